"""The error that all steps of a run have in common.

Errors of single steps average out over a run, but an error that depends on the engine, the model and the GPU does not.
Predictions of decode rows and of prompts are off by different factors, so each has its own interval.
"""

from __future__ import annotations

from math import exp, hypot, log
from statistics import NormalDist
from typing import Annotated, NamedTuple

from pydantic import Field

from tokentwin.serving.answers.figures import shown_band

Factors = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1, lt=1e3)]]

REACH = 1.645  # half-width of a normal distribution's 90 % interval in standard deviations


def factors_of(reach: float) -> Factors:
    """Return the factors exp(-`reach`) and exp(`reach`)."""
    return exp(-reach), exp(reach)


class StepInterval(NamedTuple):
    """Factors of the predicted times between which 90 % of runs lie.

    Attributes:
        decode: factors for the time of decode rows, which is reads of weights and KV, launches and CPU time
        prompts: factors for the time that prompts add, which is compute-bound GEMMs and experts, and attention of
            prompts
    """

    decode: Factors = (1.0, 1.0)
    prompts: Factors = (1.0, 1.0)

    def of_step(self, share: float) -> Factors:
        """Return the factors of a step in which prompts take the share `share` of the time."""
        low, high = (p * share + d * (1.0 - share) for d, p in zip(self.decode, self.prompts, strict=True))
        return low, high

    def __str__(self) -> str:
        """Return a sentence with both intervals in percent."""
        decode, prompts = (f"{shown_band(100 * (low - 1), 100 * (high - 1))} %" for low, high in self)
        text = f"9 of 10 runs within {decode} of the predicted time"
        return text if self.decode == self.prompts else f"{text} of decode rows and {prompts} of that of prompts"


SURE = StepInterval()


def factor_at(known: Factors, share: float) -> float:
    """Return the quantile `share` (0 to 1) of a lognormal factor whose 90 % interval is `known`."""
    fast, slow = known
    normal = NormalDist()
    reach = normal.inv_cdf(max(share, 1 - share)) / normal.inv_cdf(0.95)
    return float((fast if share < 0.5 else slow) ** reach)


def widened(known: Factors, slower: float, faster: float | None = None) -> Factors:
    """Return the interval widened by a further, independent error, whose reach in the logarithm is `slower`.

    If `faster` is given, it is the reach towards shorter times.
    """
    low, high = known
    return exp(-hypot(log(low), slower if faster is None else faster)), exp(hypot(log(high), slower))
