"""The number of requests in the system over time, and a verdict whether a run keeps up with its arrivals.

The verdict depends on the slope of the backlog. Its rule is in the glossary, under saturation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.traces.tables import Floats

_BINS = 16
FEWEST = 20  # minimum number of requests for a verdict
PILING_UP = 0.1  # a run is overloaded if its backlog grows by at least this fraction of the arrivals
GROWING = 0.02  # a backlog counts as growing from this fraction on, because a burst near the end gives a smaller slope
_FULL = 0.1  # share of the requests that end before an overloaded run is full, and after it is
_SLOWER = 1.3  # in an overload, requests of the last quarter take 7/3 times as long as those of the second
_LEAST_T, _MOST_T = 1.9599, 4.3027  # Student's t at 97.5 %, with infinite degrees of freedom and with two


class TimesInSystem:
    """Arrival and end time of each request in nanoseconds; NaN if a time is not known."""

    def __init__(self, arrivals: Floats, ends: Floats) -> None:
        self._arrivals = arrivals
        self._ends = ends

    @cached_property
    def outstanding(self) -> tuple[Floats, Floats]:
        """Sorted arrival times and sorted end times of the requests for which both are known."""
        inside = np.isfinite(self._arrivals) & np.isfinite(self._ends)
        return np.sort(self._arrivals[inside]), np.sort(self._ends[inside])

    def concurrency(self, window_ns: tuple[int, int] | None) -> tuple[float | None, int | None]:
        """Return the mean number of requests in the system over the window, and the maximum; None if not known."""
        arrivals, ends = self.outstanding
        if window_ns is None or not len(arrivals):
            return None, None
        started = np.searchsorted(arrivals, arrivals, side="right")
        # a request that ends at the time of an arrival does not count as outstanding
        ended = np.searchsorted(ends, arrivals, side="right")
        peak = int((started - ended).max())
        first, last = window_ns
        if last <= first:
            return None, peak
        return float((ends.sum() - arrivals.sum()) / (last - first)), peak

    def waiting_share(self, scheduled: Floats, counted: NDArray[np.bool_], begin: float, end: float) -> float:
        """Return the share of time spent waiting for the first step, of requests that arrive from `begin` to `end`.

        `scheduled` has the start of each request's first step, or NaN for a request without a step. `counted` is True
        for requests for which it is known whether and when they had a first step.
        """
        inside = (self._arrivals >= begin) & (self._arrivals < end) & np.isfinite(self._ends) & counted
        waits = np.fmin(scheduled, self._ends) - self._arrivals
        total = float((self._ends - self._arrivals)[inside].sum())
        return float(waits[inside].sum()) / total if total > 0 else 0.0


class Trend(NamedTuple):
    """A fitted line: its slope per second, the standard error of the slope, and this error's degrees of freedom."""

    slope: float
    error: float = 0.0
    freedom: float = 2.0

    @property
    def half(self) -> float:
        """Half-width of the 95 % interval of the slope."""
        from scipy.special import stdtrit  # slow import

        return float(stdtrit(self.freedom, 0.975)) * self.error if self.error else 0.0

    @property
    def rises(self) -> bool:
        """True if the 95 % interval of the slope lies above zero; computed without scipy in most cases."""
        slope, error = self.slope, self.error
        return slope > _MOST_T * error or (slope > _LEAST_T * error and slope > self.half)


@dataclass(frozen=True, slots=True)
class Saturation:
    """The verdict on a run, and the trend of its backlog, in requests per second."""

    verdict: str
    trend: Trend
    arrival_rate: float
    waiting_share: float


def saturation_of(arrivals: Floats, ends: Floats, waiting_share: Callable[[float, float], float]) -> Saturation | None:
    """Return the verdict for requests with these sorted arrival and end times (ns); None for too few arrivals.

    For requests that arrive from `begin` to `end`, `waiting_share(begin, end)` returns the share of their time that
    they wait for their first step.
    """
    if len(arrivals) < FEWEST or arrivals[-1] <= arrivals[0]:
        return None
    first, last = arrivals[0], arrivals[-1]
    trend = growth(arrivals, ends)
    rate = (len(arrivals) - 1) / ((last - first) / 1e9)
    waiting = waiting_share(_filled(first, last), last)
    if trend.slope >= PILING_UP * rate and trend.rises:
        verdict = "OVERLOADED"
    elif (trend.slope >= GROWING * rate and trend.rises) or waiting > 0.5:
        verdict = "BACKLOGGED"
    else:
        verdict = "STABLE"
    return Saturation(verdict, trend, float(rate), waiting)


def served_rate(ends: Floats) -> float | None:
    """Return the requests per second that a run serves while its engines are full, from sorted end times in ns.

    Requests that end first, while an overloaded run fills, and last, while it empties, are left out.
    """
    first, last = (round(share * (len(ends) - 1)) for share in (_FULL, 1 - _FULL))
    seconds = (ends[last] - ends[first]) / 1e9 if len(ends) else 0.0
    return (last - first) / seconds if seconds > 0 else None


def slows_down(latencies: Floats) -> bool:
    """Return True if requests, in the order of their arrivals, take ever longer, as in an overload."""
    quarters = np.array_split(latencies, 4)
    early, late = (float(np.median(quarters[at])) if len(quarters[at]) else 0.0 for at in (1, 3))
    return late > _SLOWER * early


def growth(arrivals: Floats, leaves: Floats) -> Trend:
    """Return the growth per second of the backlog, which is the number of requests that have arrived and not left.

    `arrivals` and `leaves` are sorted and in nanoseconds. The first quarter of the arrival period is left out, by the
    glossary's rule for saturation.
    """
    first, last = arrivals[0], arrivals[-1]
    edges = np.linspace(_filled(first, last), last, _BINS + 1)
    backlog = np.diff(_integral(arrivals, edges) - _integral(leaves, edges)) / np.diff(edges)
    return _trend((edges[:-1] + edges[1:]) / 2e9, backlog)


def _filled(first: float, last: float) -> float:
    """Return the time when a system that began empty is assumed to be filled."""
    return first + (last - first) / 4


def _integral(times: Floats, until: Floats) -> Floats:
    """Return for each t in `until` the integral until t of the number of sorted `times` that have passed."""
    origin = until[0]
    shifted = times - origin
    sums = np.concatenate([[0.0], np.cumsum(shifted)])
    passed = np.searchsorted(times, until, side="right")
    integral: Floats = passed * (until - origin) - sums[passed]
    return integral


def _trend(x: Floats, y: Floats) -> Trend:
    """Return the trend by least squares; correlated residuals reduce the degrees of freedom.

    The correlation r of a fitted line's residuals is too small by (2 + 4 r) / n (Kendall 1954 for a mean; a line has
    one more degree of freedom).
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
    """Return the inner product of two vectors without BLAS, whose order of additions differs between CPUs."""
    return float(np.einsum("i,i->", x, y))
