"""A choice among predicted configurations that allows for the errors of predictions.

An option that keeps its bounds is worth its yield; an option that breaks them is worth nothing. The choice is the
option with the greatest expected worth among the options that are likely enough to keep their bounds. "Likely enough"
is relative to the option that is most likely to keep them. If no option is certain, the most likely one is hardly more
likely than others and may have a much smaller yield. Probabilities and expectations are computed over random draws from
the predictive bands. A draw has an error for every option, because the options of one family (a model on a GPU) share a
part of their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.steps.interval import REACH

Floats = NDArray[np.float64]

DRAWS = 2000
COMMON = 0.2  # share of an error's variance that a family has in common; measured in lab/results/decisions.md
RISK = 0.1  # accepted probability of breaking a bound, by default


class Band(NamedTuple):
    """One predicted figure for every option: the prediction and the ends of its 90 % interval, each `[options]`."""

    low: Floats
    centre: Floats
    high: Floats

    def drawn(self, errors: Floats) -> Floats:
        """Return the figure `[options, draws]` at `errors` standard deviations from the prediction.

        The distribution is lognormal with a separate width for each sign.
        """
        below, above = np.log(self.low / self.centre), np.log(self.high / self.centre)
        reach = np.where(errors < 0, -below[:, None], above[:, None])
        drawn: Floats = self.centre[:, None] * np.exp(errors / REACH * reach)
        return drawn


def errors(families: Sequence[str], common: float = COMMON, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Draw each option's error in standard deviations, `[options, draws]`, correlated by `common` within a family."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shared = {family: rng.standard_normal(draws) for family in dict.fromkeys(families)}
    own = rng.standard_normal((len(families), draws))
    together = np.array([shared[family] for family in families])
    return np.sqrt(common) * together + np.sqrt(1.0 - common) * own


def share_of_best(kept: NDArray[np.bool_], yields: Floats) -> Floats:
    """Return the expected ratio of each option's yield to the best yield, `[options]`.

    Both inputs are `[options, draws]`. `kept` is True where an option keeps its bounds. The best yield of a draw is the
    greatest among the options that keep their bounds in this draw. The ratio is 0 in draws in which the option breaks a
    bound.
    """
    worth = np.where(kept, yields, 0.0)
    best = worth.max(axis=0)
    share: Floats = (worth / np.where(best > 0, best, 1.0)).mean(axis=1)
    return share


def choose(holds: Floats, worth: Floats, risk: float = RISK) -> int | None:
    """Return the index of the option to take, or None if no option ever keeps its bounds.

    `holds` is each option's probability of keeping its bounds, and `worth` is its expected worth, both `[options]`. The
    choice is the option with the greatest worth among the options with a probability of at least (1 - `risk`) times the
    largest probability. A greater risk never lowers the worth of the chosen option.
    """
    if not holds.any():
        return None
    sure = holds >= (1.0 - risk) * holds.max() - 1e-9
    return int(np.argmax(np.where(sure, worth, -np.inf)))
