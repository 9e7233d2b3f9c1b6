"""The time that requests spend in the system: when they came and left, and the number of requests at a time."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from traces.numeric_columns import Floats


class TimesInSystem:
    """Arrival and end of each request, in nanoseconds; NaN where it is not known."""

    def __init__(self, arrivals: Floats, ends: Floats) -> None:
        self._arrivals = arrivals
        self._ends = ends

    @cached_property
    def outstanding(self) -> tuple[Floats, Floats]:
        """Arrivals and ends, both sorted, of the requests for which both are known."""
        inside = np.isfinite(self._arrivals) & np.isfinite(self._ends)
        return np.sort(self._arrivals[inside]), np.sort(self._ends[inside])

    def concurrency(self, window_ns: tuple[int, int] | None) -> tuple[float | None, int | None]:
        """Return the requests at a time: time-weighted mean over the window, and peak; None where unknown."""
        arrivals, ends = self.outstanding
        if window_ns is None or not len(arrivals):
            return None, None
        started = np.searchsorted(arrivals, arrivals, side="right")
        ended = np.searchsorted(ends, arrivals, side="right")  # a request that ends when another arrives is gone
        peak = int((started - ended).max())
        first, last = window_ns
        if last <= first:
            return None, peak
        return float((ends.sum() - arrivals.sum()) / (last - first)), peak

    def waiting_share(self, scheduled: Floats, counted: NDArray[np.bool_], begin: float, end: float) -> float:
        """Return the share of their time that requests arriving between `begin` and `end` wait for their first step.

        `counted` marks the requests that count: their first step is known. `scheduled` is NaN for a request without a
        step.
        """
        inside = (self._arrivals >= begin) & (self._arrivals < end) & np.isfinite(self._ends) & counted
        waits = np.fmin(scheduled, self._ends) - self._arrivals
        total = float((self._ends - self._arrivals)[inside].sum())
        return float(waits[inside].sum()) / total if total > 0 else 0.0
