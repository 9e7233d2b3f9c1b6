"""Whether a run keeps up with its arrivals, by the slope of its backlog. The rule is the glossary's, of saturation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 16
FEWEST = 20  # requests below which nothing is said about saturation
PILING_UP = 0.1  # share of the arrivals that piles up when a run is overloaded
_GROWING = 0.02  # and when its backlog is said to grow at all: a burst near the end makes a line rise by less
_LEAST_T, _MOST_T = 1.9599, 4.3027  # Student's t at 97.5 %, with infinite degrees of freedom and with two


class Trend(NamedTuple):
    """A fitted line: its slope per second, the standard error of that, and how many degrees of freedom this has."""

    slope: float
    error: float = 0.0
    freedom: float = 2.0

    @property
    def half(self) -> float:
        """Half of the 95 % interval of the slope."""
        from scipy.special import stdtrit  # imports slowly

        return float(stdtrit(self.freedom, 0.975)) * self.error if self.error else 0.0

    @property
    def rises(self) -> bool:
        """Whether the 95 % interval lies above zero; mostly told without scipy."""
        slope, error = self.slope, self.error
        return slope > _MOST_T * error or (slope > _LEAST_T * error and slope > self.half)


@dataclass(frozen=True, slots=True)
class Saturation:
    """Whether the run keeps up, and the trend of its backlog, in requests per second."""

    verdict: str
    trend: Trend
    arrival_rate: float
    waiting_share: float


def saturation_of(arrivals: Floats, ends: Floats, waiting_share: Callable[[float, float], float]) -> Saturation | None:
    """By when requests came and left, in nanoseconds and in order; None when too few arrive to tell.

    `waiting_share` says which share of their time those that arrive between two times wait for their first step.
    """
    if len(arrivals) < FEWEST or arrivals[-1] <= arrivals[0]:
        return None
    first, last = arrivals[0], arrivals[-1]
    trend = growth(arrivals, ends)
    rate = (len(arrivals) - 1) / ((last - first) / 1e9)
    waiting = waiting_share(_filled(first, last), last)
    if trend.slope >= PILING_UP * rate and trend.rises:
        verdict = "OVERLOADED"
    elif (trend.slope >= _GROWING * rate and trend.rises) or waiting > 0.5:
        verdict = "BACKLOGGED"
    else:
        verdict = "STABLE"
    return Saturation(verdict, trend, float(rate), waiting)


def growth(arrivals: Floats, leaves: Floats) -> Trend:
    """How fast those that came and have not left become more, per second.

    `arrivals` and `leaves` are in nanoseconds and in order. Looks at the arrival period without its first quarter; the
    rule is the glossary's, of saturation.
    """
    first, last = arrivals[0], arrivals[-1]
    edges = np.linspace(_filled(first, last), last, _BINS + 1)
    backlog = np.diff(_integral(arrivals, edges) - _integral(leaves, edges)) / np.diff(edges)
    return _trend((edges[:-1] + edges[1:]) / 2e9, backlog)


def _filled(first: float, last: float) -> float:
    """When an empty system counts as filled."""
    return first + (last - first) / 4


def _integral(times: Floats, until: Floats) -> Floats:
    """For each t of `until`, the integral up to t of the number of `times` (in order) that have passed."""
    origin = until[0]
    shifted = times - origin
    sums = np.concatenate([[0.0], np.cumsum(shifted)])
    passed = np.searchsorted(times, until, side="right")
    integral: Floats = passed * (until - origin) - sums[passed]
    return integral


def _trend(x: Floats, y: Floats) -> Trend:
    """Of the least-squares line, with fewer degrees of freedom for correlated residuals.

    Residuals of a fitted line look less correlated than they are, by (2 + 4 r) / n (Kendall 1954 for a mean; a line
    takes one degree of freedom more).
    """
    n = len(x)
    centred = x - x.mean()
    spread = _product(centred, centred)
    slope = _product(centred, y) / spread
    residuals = y - y.mean() - slope * centred
    total = _product(residuals, residuals)
    if total <= 1e-12 * max(_product(y, y), 1.0):
        return Trend(slope)
    seen = _product(residuals[1:], residuals[:-1]) / total
    correlation = min(max(seen + (2 + 4 * seen) / n, 0.0), 0.9)
    effective = max(n * (1 - correlation) / (1 + correlation), 4.0)
    return Trend(slope, math.sqrt(total / (effective - 2) / spread), effective - 2)


def _product(x: Floats, y: Floats) -> float:
    """Of two vectors, without BLAS, which adds in another order on each CPU."""
    return float(np.einsum("i,i->", x, y))
