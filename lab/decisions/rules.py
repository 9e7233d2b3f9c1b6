"""Rules for choosing a configuration: by expected utility under the prediction intervals, or by simpler criteria.

A rule sees only predictions. The anchored one also sees the measurement of a single configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from calibration.choice import DRAWS, RISK, Band, Floats, choose, errors, share_of_best
from lab.decisions.configurations import Configuration, Times
from lab.decisions.questions import Group, Slo


class Taken(NamedTuple):
    """The index of the chosen option or None, and its probability of meeting the bounds, if the rule knows it."""

    option: int | None
    promised: float | None = None


Rule = Callable[[Group, Slo], Taken]


def by_expected_worth(risk: float = RISK) -> Rule:
    """Return our rule (see `calibration.choice`), by which configurations of one model on one GPU share errors."""

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
