"""Step quantities over time, summed over the replicas, for runs of millions of steps.

Whole columns of intermediate results would take several times the memory, and allocating it takes longer than the sums.
So only the changes of each column are kept. Sums, and their reduction for the screen, are computed for one piece of the
run at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.dashboard.series import column, envelope, extremes
from tokentwin.traces.recording import Recording

Array = NDArray[Any]
Window = tuple[float, float]  # start and end in seconds; both are inside

STATES = ("waiting", "running", "used_blocks")
BATCH = ("prefill_tokens", "decode_rows", "draft_tokens")  # the last only if some are recorded
_COLUMNS = ("replica", "start_ns", "end_ns", *STATES, *BATCH[:2])

_PIECE = 1 << 18  # number of steps at a time, so that temporary arrays have 2 MB
_SAMPLE = 1 << 18  # number of steps in a sample; more steps do not change their median


class StepSeries:
    """Quantities of the steps over time: each step's value holds until the next step of its replica starts.

    The value of a replica that has been idle for longer than ten median steps is 0. Null counts as 0. The steps may be
    in any order. Returned times are in nanoseconds, sorted and distinct.
    """

    def __init__(self, steps: pa.Table, names: Sequence[str]) -> None:
        self._steps = steps
        self._start, end, replica = (_numbers(steps, name) for name in ("start_ns", "end_ns", "replica"))
        values = {name: _numbers(steps, name) for name in names}
        self._change = {name: value.copy() for name, value in values.items()}
        self._order = np.argsort(self._start, kind="stable")  # nearly in order already, so a stable sort only merges
        fell, rose = [np.empty(0, dtype=np.int64)], [self._order[:0]]
        some = slice(None, None, max(steps.num_rows // _SAMPLE, 1))
        usual_ns = float(np.median(end[some] - self._start[some])) if steps.num_rows else 0.0
        for before, after in _successors(self._order, replica, self._start):
            if len(fell) == 1:
                rose.append(before[:1])  # the very first step follows no other
            idle = np.ones(len(before), dtype=bool)
            next_to = before[: len(after)]
            idle[: len(after)] = replica[after] != replica[next_to]
            idle[: len(after)] |= self._start[after] - end[next_to] > 10 * usual_ns
            fell.append(before[idle])
            rose.append(after[idle[: len(after)]])
            busy = ~idle[: len(after)]
            for name, value in values.items():
                self._change[name][after[busy]] -= value[next_to[busy]]
        falls = np.concatenate(fell)
        falls = falls[np.argsort(end[falls], kind="stable")]
        self._fall_at = end[falls]
        self._fall = {name: value[falls] for name, value in values.items()}
        # All replicas are idle when as many have become idle as have become busy. The end of the last step does not
        # count as a gap.
        begun = np.searchsorted(np.sort(self._start[np.concatenate(rose)]), self._fall_at, side="right")
        idle_at = self._fall_at[begun == np.arange(1, len(falls) + 1)]
        self._all_idle_at = idle_at[idle_at < self._start.max(initial=0)]

    @classmethod
    def from_steps(cls, steps: pa.Table) -> StepSeries:
        """Return the quantities that a timeline shows; batches are included if there is only one replica."""
        alone = pc.count_distinct(steps["replica"]).as_py() == 1
        return cls(steps, [*STATES, *(_batch(steps) if alone else [])])

    @classmethod
    def from_recording(cls, recording: Recording) -> StepSeries:
        return cls.from_steps(recording.table("steps", [*_COLUMNS, *recording.filled("steps", BATCH[2:])]))

    def __len__(self) -> int:
        return len(self._start)

    def batches(self, window: Window | None = None) -> tuple[Array, dict[str, Array]]:
        """Return `BATCH` over time. Batches of several replicas are not summed, because they are different steps."""
        names = _batch(self._steps)
        summed = all(name in self._change for name in names)
        times, values = (self.over_time if summed else self.started)(names, window)
        return times, dict(zip(names, values, strict=True))

    def over_time(self, names: Sequence[str], window: Window | None = None) -> tuple[Array, list[Array]]:
        """Return the times of changes within the window, and each name's sum over replicas until the next change."""
        _, times, values = next(self._pieces(names, self._ends(window)))
        return times, values

    def started(self, names: Sequence[str], window: Window | None = None) -> tuple[Array, list[Array]]:
        """Return when steps within the window start, and their values, not summed; 0 once no replica is busy."""
        ends = self._ends(window)
        rows = self._order[slice(*np.searchsorted(self._start, ends, sorter=self._order))]
        idle = self._all_idle_at[slice(*np.searchsorted(self._all_idle_at, ends))]
        times, values = self._start[rows], [_numbers(self._steps, name)[rows] for name in names]
        if not len(idle):
            return times, values
        at = np.searchsorted(times, idle, side="right")
        return np.insert(times, at, idle), [np.insert(value, at, 0) for value in values]

    def lows_and_highs(
        self, names: Sequence[str], window: Window | None = None, buckets: int = 700
    ) -> list[tuple[Array, Array]]:
        """Return for each name the series within the window, reduced by `envelope`, with its value at the beginning."""
        ends = self._ends(window)
        rows = np.searchsorted(self._start, ends, sorter=self._order)
        falls = np.searchsorted(self._fall_at, ends)
        begin = [] if window is None or not (rows[0] or falls[0]) else [window[0] * 1e9]
        count = int(rows[1] - rows[0] + falls[1] - falls[0])
        if count <= _PIECE:
            before, times, values = next(self._pieces(names, ends))
            times = np.append(begin, times)
            return [
                envelope(times, np.append(start[: len(begin)], value), buckets)
                for start, value in zip(before, values, strict=True)
            ]
        first, last = self._span(rows, falls)
        edges = np.linspace(begin[0] if begin else first, last, buckets + 1)[:-1]
        starts = np.ceil(edges).astype(np.int64)
        step = max(buckets * _PIECE // count, 1)
        reduced: list[list[tuple[Array, Array]]] = [[] for _ in names]
        for at, (before, times, values) in zip(
            range(0, buckets, step), self._pieces(names, [*starts[::step].tolist(), ends[1]]), strict=True
        ):
            parts = np.searchsorted(times, starts[at : at + step])
            if at == 0 and begin:
                times = np.append(begin, times)
                values = [np.append(start, value) for start, value in zip(before, values, strict=True)]
                parts[1:] += 1
            for series, value in zip(reduced, values, strict=True):
                kept = extremes(value, parts)
                if len(times) and times[-1] == last:
                    kept = np.union1d(kept, [len(times) - 1])
                series.append((times[kept], value[kept]))
        return [(np.concatenate([x for x, _ in series]), np.concatenate([y for _, y in series])) for series in reduced]

    def _pieces(self, names: Sequence[str], edges: Sequence[int]) -> Iterator[tuple[list[Array], Array, list[Array]]]:
        """Yield for each pair of edges the values before it (one per name), the times, and the values from then on."""
        rows = np.searchsorted(self._start, edges, sorter=self._order)
        falls = np.searchsorted(self._fall_at, edges)
        earlier = [
            np.array([self._change[name][self._order[: rows[0]]].sum() - self._fall[name][: falls[0]].sum()])
            for name in names
        ]
        for (first, last), (fall, until) in zip(pairwise(rows), pairwise(falls), strict=True):
            inside = self._order[first:last]
            start = self._start[inside]
            at = np.searchsorted(start, self._fall_at[fall:until], side="right")
            times = np.insert(start, at, self._fall_at[fall:until])
            final = np.ones(len(times), dtype=bool)
            final[:-1] = times[1:] != times[:-1]
            changes = [np.insert(self._change[name][inside], at, -self._fall[name][fall:until]) for name in names]
            sums = [before + np.cumsum(change) for before, change in zip(earlier, changes, strict=True)]
            yield earlier, times[final], [value[final] for value in sums]
            earlier = [value[-1:] if len(value) else before for before, value in zip(earlier, sums, strict=True)]

    def _ends(self, window: Window | None) -> tuple[int, int]:
        """Return the first nanosecond of the window, and the first after it."""
        if window is not None:
            return math.ceil(window[0] * 1e9), math.floor(window[1] * 1e9) + 1
        if not len(self._order):
            return 0, 0
        first, last = self._span((0, len(self._order)), (0, len(self._fall_at)))
        return math.ceil(first), math.floor(last) + 1

    def _span(self, rows: Sequence[int] | Array, falls: Sequence[int] | Array) -> tuple[float, float]:
        """Return the first and the last time of some steps in order, and of some falls; there must be one."""
        steps = self._order[[rows[0], rows[1] - 1] if rows[1] > rows[0] else []]
        ends = [falls[0], falls[1] - 1] if falls[1] > falls[0] else []
        times = [*self._start[steps].tolist(), *self._fall_at[ends].tolist()]
        return min(times), max(times)


def _successors(order: Array, replica: Array, start: Array) -> Iterator[tuple[Array, Array]]:
    """Yield rows, grouped by replica and sorted, with the row that follows each; the last row has none."""
    if len(replica) and replica.max() <= np.iinfo(np.int16).max:
        replica = replica.astype(np.int16)  # numpy then sorts by counting
    own = np.argsort(replica, kind="stable")  # simulators write each replica's rows in order
    if any(((replica[a] == replica[b[: len(a)]]) & (start[a] < start[b[: len(a)]])).any() for b, a in _pairs(own)):
        own = order[np.argsort(replica[order], kind="stable")]
    return _pairs(own)


def _pairs(rows: Array) -> Iterator[tuple[Array, Array]]:
    """Yield pieces of `rows`, and the rows that follow them; nothing follows the last row."""
    for at in range(0, len(rows), _PIECE):
        yield rows[at : at + _PIECE], rows[at + 1 : at + _PIECE + 1]


def _batch(steps: pa.Table) -> list[str]:
    return [name for name in BATCH if name in steps.column_names]


def _numbers(table: pa.Table, name: str) -> Array:
    """Return a numeric column as it is stored, with 0 for null."""
    values = table.column(name)
    return np.nan_to_num(column(table, name)) if values.null_count else values.to_numpy()
