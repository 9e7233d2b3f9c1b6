"""Times of many steps, kept as a few numbers for each run of steady ones until numpy writes them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.decode_run import DecodeRun


class StepTimes:
    """Times in nanoseconds, in the order in which they were added.

    They are kept in pieces. Time i of a piece is `(first_ps + i * growth_ps) // 1000` after the one before it, and the
    first of them after `base_ns`. A single time is the base of a piece of one.
    """

    __slots__ = ("_base_ns", "_counts", "_first_ps", "_growth_ps")

    def __init__(self) -> None:
        self._base_ns: list[int] = []
        self._first_ps: list[int] = []
        self._growth_ps: list[int] = []
        self._counts: list[int] = []

    def add(self, ns: int) -> None:
        self._add_piece(ns, 0, 0, 1)

    def add_all(self, times_ns: list[int]) -> None:
        nothing = [0] * len(times_ns)
        self._base_ns += times_ns
        self._first_ps += nothing
        self._growth_ps += nothing
        self._counts += [1] * len(times_ns)

    def add_run(self, run: DecodeRun, base_ns: int, steps: int) -> None:
        """Add when each of the first `steps` steps of `run` ends, which begins at `base_ns`."""
        part: DecodeRun | None = run
        while part is not None and steps > 0:
            count = min(part.own_steps, steps)
            self._add_piece(base_ns, part.first_ps, part.growth_ps, count)
            base_ns += part.own_ns
            steps -= count
            part = part.then

    def _add_piece(self, base_ns: int, first_ps: int, growth_ps: int, count: int) -> None:
        self._base_ns.append(base_ns)
        self._first_ps.append(first_ps)
        self._growth_ps.append(growth_ps)
        self._counts.append(count)

    def array(self) -> npt.NDArray[np.int64]:
        """Return all times."""
        counts = np.array(self._counts, np.int64)
        first_ps, growth_ps = np.array(self._first_ps, np.int64), np.array(self._growth_ps, np.int64)
        begins = np.cumsum(counts) - counts
        ns = np.repeat(growth_ps, counts)
        ns *= np.arange(len(ns))
        ns += np.repeat(first_ps - growth_ps * begins, counts)
        ns //= 1000
        sums = np.cumsum(ns)
        sums += np.repeat(np.array(self._base_ns, np.int64) - sums[begins] + ns[begins], counts)
        return sums

    def clear(self) -> None:
        self._base_ns.clear()
        self._first_ps.clear()
        self._growth_ps.clear()
        self._counts.clear()
