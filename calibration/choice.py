"""A choice among predicted configurations that allows for the errors of predictions.

An option that keeps its bounds is worth its yield; an option that breaks them is worth nothing. The choice is the
option of greatest expected worth among the options that are likely enough to keep their bounds. The surest option sets
what is likely enough: where nothing is sure, the surest option gives much away and is hardly surer than others.
Everything is counted over draws from the predictive band. A draw gives the error of every option at once, because the
options of one family (a model on a GPU) share a part of their errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.steps.interval import REACH

Floats = NDArray[np.float64]

DRAWS = 2000
COMMON = 0.2  # share of an error's variance that a family shares; lab/results/decisions.md has the measurement
RISK = 0.1  # probability of breaking a bound that is accepted by default


class Band(NamedTuple):
    """A figure of some options `[options]`: the prediction and both ends of its 90 % interval."""

    low: Floats
    centre: Floats
    high: Floats

    def drawn(self, errors: Floats) -> Floats:
        """Return the figure `[options, draws]` that lies `errors` standard deviations off.

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
    """Return the share of the best yield that each option is expected to reach, `[options]`.

    Both inputs are `[options, draws]`. The best is the greatest yield in the same draw among options that keep their
    bounds (`kept`). An option has 0 in draws in which it breaks a bound.
    """
    worth = np.where(kept, yields, 0.0)
    best = worth.max(axis=0)
    share: Floats = (worth / np.where(best > 0, best, 1.0)).mean(axis=1)
    return share


def choose(holds: Floats, worth: Floats, risk: float = RISK) -> int | None:
    """Return the index of the option to take, or None if no option ever keeps its bounds.

    `holds` is each option's probability of keeping its bounds and `worth` its expected worth, both `[options]`. The
    choice is the option of greatest worth among the ones whose probability is at least 1 - `risk` times the probability
    of the surest. More risk never lowers what the chosen option is worth where it keeps its bounds.
    """
    if not holds.any():
        return None
    sure = holds >= (1.0 - risk) * holds.max() - 1e-9
    return int(np.argmax(np.where(sure, worth, -np.inf)))
