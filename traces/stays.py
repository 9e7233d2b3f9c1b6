"""When requests came into the system and left it, and how many were there at once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from traces.numeric_columns import Floats


class Stays:
    """Of each request when it came and left, in nanoseconds; NaN where that is not known."""

    def __init__(self, arrivals: Floats, ends: Floats) -> None:
        self._arrivals = arrivals
        self._ends = ends

    @cached_property
    def outstanding(self) -> tuple[Floats, Floats]:
        """Arrivals and ends, each in order, of those of which both are known."""
        inside = np.isfinite(self._arrivals) & np.isfinite(self._ends)
        return np.sort(self._arrivals[inside]), np.sort(self._ends[inside])

    def concurrency(self, window_ns: tuple[int, int] | None) -> tuple[float | None, int | None]:
        """Requests at once: time-weighted mean over the window, and peak; None where they are not known."""
        arrivals, ends = self.outstanding
        if window_ns is None or not len(arrivals):
            return None, None
        started = np.searchsorted(arrivals, arrivals, side="right")
        ended = np.searchsorted(ends, arrivals, side="right")  # a request that ends as one arrives is gone
        peak = int((started - ended).max())
        first, last = window_ns
        if last <= first:
            return None, peak
        return float((ends.sum() - arrivals.sum()) / (last - first)), peak

    def waiting_share(self, scheduled: Floats, told: NDArray[np.bool_], begin: float, end: float) -> float:
        """Share of their time that requests arriving between `begin` and `end` wait for their first step.

        Only those count of which it is `told` when that was; `scheduled` is NaN for those that had none.
        """
        inside = (self._arrivals >= begin) & (self._arrivals < end) & np.isfinite(self._ends) & told
        waits = np.fmin(scheduled, self._ends) - self._arrivals
        stays = float((self._ends - self._arrivals)[inside].sum())
        return float(waits[inside].sum()) / stays if stays > 0 else 0.0
