"""Which of several predicted configurations to take, where predictions are off by more than nothing.

An option is worth what it yields if it keeps its bounds, and nothing if it breaks them. Of the options that keep them
with enough probability the one of greatest expected worth is taken. What is enough is told by the surest option: where
nothing is sure, the surest gives much away and is hardly surer than others. Everything is counted over draws from the
predictive band: a draw says of every option at once how far off its prediction is, because some of that is common to
the options of one family (a model on a GPU), which are off together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.steps.interval import REACH

Floats = NDArray[np.float64]

DRAWS = 2000
COMMON = 0.2  # share of an error's variance that is common to a family; lab/results/decisions.md has what was measured
RISK = 0.1  # of breaking a bound that is taken unless it is said otherwise


class Band(NamedTuple):
    """A figure of some options `[options]`, as predicted and at both ends of its 90 % interval."""

    low: Floats
    centre: Floats
    high: Floats

    def at(self, errors: Floats) -> Floats:
        """The figure `[options, draws]`, so many standard deviations off: lognormal, with a side for either sign."""
        below, above = np.log(self.low / self.centre), np.log(self.high / self.centre)
        reach = np.where(errors < 0, -below[:, None], above[:, None])
        drawn: Floats = self.centre[:, None] * np.exp(errors / REACH * reach)
        return drawn


def errors(families: Sequence[str], common: float = COMMON, draws: int = DRAWS, seed: int = 0) -> Floats:
    """How many standard deviations each option is off, `[options, draws]`, correlated by `common` within a family."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shared = {family: rng.standard_normal(draws) for family in dict.fromkeys(families)}
    own = rng.standard_normal((len(families), draws))
    together = np.array([shared[family] for family in families])
    return np.sqrt(common) * together + np.sqrt(1.0 - common) * own


def share_of_best(kept: NDArray[np.bool_], yields: Floats) -> Floats:
    """Of each option what it is expected to yield of the best there is, `[options]`, from both `[options, draws]`.

    That is, of the most that any option yields in the same draw and is `kept`; 0 in draws in which it breaks a bound.
    """
    worth = np.where(kept, yields, 0.0)
    best = worth.max(axis=0)
    share: Floats = (worth / np.where(best > 0, best, 1.0)).mean(axis=1)
    return share


def choose(holds: Floats, worth: Floats, risk: float = RISK) -> int | None:
    """One of the options that keep their bounds with probability `holds` and are expected to be worth `worth`.

    Both are `[options]`. Taken is the greatest expected worth among those that hold with at least 1 - `risk` of the
    probability of the surest; None if none ever does. More risk never lowers what the chosen option is worth where it
    keeps its bounds.
    """
    if not holds.any():
        return None
    sure = holds >= (1.0 - risk) * holds.max() - 1e-9
    return int(np.argmax(np.where(sure, worth, -np.inf)))
