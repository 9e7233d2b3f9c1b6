"""Rules for choosing a configuration: by expected utility under the prediction intervals, or by simpler criteria.

A rule sees only predictions. The anchored one also sees the measurement of a single configuration.

Probabilities and expectations of our rule are computed over random draws from the predictive bands. A draw has an error
for every option, because the options of one family (a model on a GPU) share a part of their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.decisions.configurations import Configuration, Times
from lab.decisions.questions import Group, Slo
from tokentwin.calibration.steps.interval import REACH
from tokentwin.planning.plan.worth import RISK, choose

Floats = NDArray[np.float64]

DRAWS = 2000
COMMON = 0.2  # share of an error's variance that a family has in common; measured in lab/results/decisions.md


class Taken(NamedTuple):
    """The index of the chosen option or None, and its probability of meeting the bounds, if the rule knows it."""

    option: int | None
    promised: float | None = None


Rule = Callable[[Group, Slo], Taken]


def by_expected_worth(risk: float = RISK) -> Rule:
    """Return our rule (see `choose`), with errors that configurations of one model on one GPU share."""

    def rule(group: Group, slo: Slo) -> Taken:
        drawn = _drawn(group)
        kept = (drawn.ttft_ms <= slo.ttft_ms) & (drawn.tpot_ms <= slo.tpot_ms)
        holds = kept.mean(axis=1)
        best = choose(holds, share_of_best(kept, drawn.throughput), risk)
        return Taken(None) if best is None else Taken(best, float(holds[best]))

    return rule


Predicted = Callable[[Configuration], Times]


def most_throughput(times: Predicted, bounded: Predicted | None = None) -> Rule:
    """Return the rule that takes the highest throughput by `times` among options within the bounds.

    Predictions by `bounded` are held against the bounds, or those by `times` if `bounded` is None.
    """

    def rule(group: Group, slo: Slo) -> Taken:
        gains = [o.throughput(times(o)) if slo.kept((bounded or times)(o)) else 0.0 for o in group.options]
        return Taken(int(np.argmax(gains)) if max(gains) > 0 else None)

    return rule


def anchored(group: Group, slo: Slo) -> Taken:
    """Choose by the roofline times one factor, which makes the TPOT of the middle configuration right.

    The middle one is taken in the order of the number of GPUs, then of requests in flight.
    """
    ordered = sorted(group.options, key=lambda o: (o.gpus, o.requests, o.gpu, o.run))
    middle = ordered[len(ordered) // 2]
    factor = middle.measured.tpot_ms / middle.roofline.tpot_ms
    return most_throughput(lambda o: Times(*(factor * ms for ms in o.roofline)))(group, slo)


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


@dataclass(frozen=True)
class _Drawn:
    ttft_ms: Floats
    tpot_ms: Floats
    throughput: Floats


@lru_cache(maxsize=1)
def _drawn(group: Group) -> _Drawn:
    """Draw latencies and throughput `[options, draws]`; errors of TTFT and TPOT are independent, as measured."""
    options = group.options
    both = errors([f"{figure} {option.gpu}" for figure in Times._fields for option in options], draws=DRAWS)
    bands = (Band(*(_column(options, end, at) for end in ("low", "blind", "high"))) for at in (0, 1))
    ttft, tpot = (band.drawn(off) for band, off in zip(bands, np.split(both, 2), strict=True))
    outputs = np.array([option.lengths[1] for option in options])[:, None]
    slots = np.array([option.requests / option.gpus for option in options])[:, None]
    return _Drawn(ttft, tpot, 1e3 * slots * outputs / (ttft + (outputs - 1) * tpot))


def _column(options: Sequence[Configuration], end: str, at: int) -> Floats:
    return np.array([getattr(option, end)[at] for option in options])


RULES: dict[str, Rule] = {
    f"expected worth, risk {100 * RISK:.0f} %": by_expected_worth(),
    "centre of the band": most_throughput(lambda o: o.blind),
    "slow end of the band": most_throughput(lambda o: o.blind, lambda o: o.high),
    "roofline": most_throughput(lambda o: o.roofline),
    "anchored constant": anchored,
}
APPETITES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
