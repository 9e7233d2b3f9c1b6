"""Rows of the dataset `steps`, in the order in which steps ended on all replicas.

A run of steady steps is one record until its rows are due: then numpy writes them out. A replica that leaps tells of
its steps when it lands, so what has ended since the earliest of the leaps under way began is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.scheduler import Scheduler
from serving.step_plan import by_admission
from sim.leap import Leap
from traces.schema import STEPS

_MEASURED_ONLY = (
    "schedule_ns", "prepare_ns", "launch_ns", "host_ns", "forward_ns", "sample_ns", "graph", "op_ns", "mask_ns",
    "thread_ns", "speed", "experts_hit", "expert_imbalance", "expert_tokens", "draft_ns", "row_accepted",
    "row_proposed", "heard_ns", "loaded_ids", "released_ids", "kv_attempts", "kv_transfers", "kv_attempts_in_flight",
)  # fmt: skip
_COLUMNS = [column.name for column in STEPS if column.name not in _MEASURED_ONLY]
_NUMBERS = _COLUMNS.index("row_ids")  # the columns before are numbers, and all others mostly null
_NOTHING: tuple[Any, ...] = (None,) * (len(_COLUMNS) - _NUMBERS)
_NEVER = 1 << 62


def _places(*names: str) -> list[int]:
    return [_COLUMNS.index(name) + 1 for name in names]


# What `StepLog` keeps of a leap, in its order: what grows with each of its steps, what does not, and where the rest is
_GROWING = _places("step", "decode_context", "used_blocks")
_SAME = _places("replica", "decode_rows", "sampled_rows", "running", "waiting", "waiting_blocks", "in_flight")
_OF_LEAP = [*_GROWING, *_SAME, _NUMBERS + 1]
_TIMES = _places("plan_ns", "start_ns", "end_ns")
_ROWS = _COLUMNS.index("decode_rows") + 1

Numbers = npt.NDArray[np.int64]


class StepLog:
    """Gives rows to `add`, `block` at once."""

    def __init__(self, add: Callable[[Mapping[str, Sequence[Any]]], None], block: int) -> None:
        self._add = add
        self._block = block
        self._under_way: dict[int, deque[tuple[Any, ...]]] = {}  # rows of steps in flight
        self._next: dict[int, int] = {}  # number of the next step of each replica
        self._leaping: dict[int, int] = {}  # when each leap under way began
        self._ended_ns: list[int] = []
        self._rows: list[tuple[Any, ...]] = []  # of single steps that have ended, in that order
        self._taken: list[tuple[Any, ...]] = []  # leaps that have not become numbers: see `_numbers_of_leaps`
        self._sorted: list[Numbers] = []  # of others: when each ended, its numbers, and where the rest is
        self._rest: list[tuple[Any, ...]] = [_NOTHING]
        self._pending = self._held_back = 0

    def planned(self, replica: int, row: tuple[Any, ...]) -> None:
        self._under_way.setdefault(replica, deque()).append(row)
        self._next[replica] = row[1] + 1

    def committed(self, replica: int, now_ns: int) -> None:
        self._commit(replica, now_ns)
        self._write_if_due()

    def _commit(self, replica: int, now_ns: int) -> None:
        self._ended_ns.append(now_ns)
        self._rows.append(self._under_way[replica].popleft())
        self._pending += 1

    def leaps(self, replica: int, now_ns: int) -> None:
        """From now on its steps are known when it lands."""
        self._leaping[replica] = now_ns

    def lands(self, replica: int) -> None:
        self._leaping.pop(replica, None)

    def leapt(
        self, replica: int, scheduler: Scheduler, leap: Leap, steps: int, waiting_blocks: int, rows: bool
    ) -> None:
        """`scheduler` is about to take the first `steps` steps of `leap`; the last may be in flight then.

        Requests that wait would need `waiting_blocks`. With `rows`, each step's are kept.
        """
        decodes, pool = scheduler.decodes, scheduler.pool
        count, step, place, rest = len(decodes.members), self._next[replica], 0, _NOTHING
        if rows:
            ids = [request.id for request in sorted(decodes.members.values(), key=by_admission)]
            place, rest = len(self._rest), (ids, [1] * count, [], [], *_NOTHING[4:])
            self._rest.append(rest)
        self._next[replica] = step + steps
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        same = replica, count, count, running, waiting, waiting_blocks, int(leap.overlaps), place
        of_leap = step, decodes.context, pool.total - pool.free, *same
        if leap.overlaps:  # nothing is written before the steps after it are there, too
            self._commit(replica, leap.turns_ns[0])
            steps -= 1
            last = np.zeros(_NUMBERS + 2, np.int64)
            last[_OF_LEAP] = of_leap
            last[_GROWING] += steps, count * steps, pool.ahead(decodes, steps + 1)
            last[_TIMES] = leap.plan_ns(steps), leap.start_ns(steps), leap.ends_ns[steps]
            self._under_way[replica].append((*last[1:-1].tolist(), *rest))
        if steps:
            self._taken.append((leap, steps, list(accumulate(decodes.crossing_by_tick(), initial=0)), of_leap))
            self._pending += steps
            self._write_if_due()

    def _numbers_of_leaps(self) -> Numbers:
        """Of all steps that were leapt over: when each was taken in, its numbers, and where the rest is."""
        leaps, steps, crossings, of_leap = zip(*self._taken, strict=True)
        self._taken = []
        counts = np.array(steps)

        def each(values: Sequence[int]) -> Numbers:
            return np.repeat(np.array(values), counts)

        def begins(lengths: Sequence[int]) -> Numbers:
            """Where each leap's values begin among those of all."""
            return each([0, *accumulate(lengths[:-1])])

        behind = each([leap.overlaps for leap in leaps]).astype(np.int64)  # steps in flight
        step = np.arange(len(behind)) - begins(steps)
        numbers = np.zeros((_NUMBERS + 2, len(step)), np.int64)
        numbers[_OF_LEAP] = np.repeat(np.array(of_leap).T, counts, axis=1)

        turns = [
            [leap.began_ns, *leap.turns_ns[: count + leap.overlaps]] for leap, count in zip(leaps, steps, strict=True)
        ]
        turns_ns = np.fromiter(chain.from_iterable(turns), np.int64)
        at = begins(list(map(len, turns))) + step
        numbers[0] = turns_ns[at + 1 + behind]
        starts_ns = np.where(behind, turns_ns[at + 1], turns_ns[at] + each([leap.cpu_ns for leap in leaps]))
        ends_ns = np.fromiter(chain.from_iterable(map(_ends, leaps, steps)), np.int64)
        numbers[_TIMES] = turns_ns[at], starts_ns, ends_ns

        sizes = [len(crossed) - 1 for crossed in crossings]
        rounds, ticks = np.divmod(step + 1, each(sizes))
        crossed = np.fromiter(chain.from_iterable(crossings), np.int64)
        rows = numbers[_ROWS]
        blocks = rounds * rows + crossed[begins(list(map(len, crossings))) + ticks]
        numbers[_GROWING] += step, rows * step, blocks
        return numbers

    def crashed(self, replica: int) -> None:
        """Its steps in flight never end."""
        self._under_way.pop(replica, None)
        self._leaping.pop(replica, None)

    def close(self) -> None:
        self._leaping.clear()
        self._write(_NEVER, 1)

    def _write_if_due(self) -> None:
        if self._pending >= self._block + self._held_back:
            self._write(min(self._leaping.values(), default=_NEVER), self._block)

    def _write(self, before_ns: int, whole: int) -> None:
        """Hand over the rows of steps that ended before then, a multiple of `whole`."""
        if not (self._sorted or self._taken or self._leaping):
            self._hand_over_singles(len(self._rows) // whole * whole)
            return
        numbers = self._in_order()
        due = int(np.searchsorted(numbers[0], before_ns)) // whole * whole
        for begin in range(0, due, self._block):
            part = numbers[:, begin : min(begin + self._block, due)]
            columns: dict[str, Any] = dict(zip(_COLUMNS, part[1:-1], strict=False))
            if part[-1].any():  # else the other columns are null
                kept = [self._rest[at] for at in part[-1].tolist()]
                columns |= zip(_COLUMNS[_NUMBERS:], zip(*kept, strict=True), strict=True)
            self._add(columns)
        numbers = numbers[:, due:].copy()
        used, numbers[-1] = np.unique(numbers[-1], return_inverse=True)
        if len(used) and used[0]:  # 0 stays nothing
            numbers[-1] += 1
        self._rest = [_NOTHING, *(self._rest[at] for at in used.tolist() if at)]
        self._pending = self._held_back = numbers.shape[1]
        self._sorted = [numbers] if self._pending else []

    def _in_order(self) -> Numbers:
        """All that is pending, in order of ends, replicas and steps."""
        if self._rows:
            singles = np.zeros((_NUMBERS + 2, len(self._rows)), np.int64)
            singles[0] = self._ended_ns
            singles[1:-1] = np.array([row[:_NUMBERS] for row in self._rows]).T
            for at, row in enumerate(self._rows):
                if row[_NUMBERS:] != _NOTHING:
                    singles[-1, at] = len(self._rest)
                    self._rest.append(row[_NUMBERS:])
            self._sorted.append(singles)
            self._rows, self._ended_ns = [], []
        if self._taken:
            self._sorted.append(self._numbers_of_leaps())
        numbers = np.concatenate(self._sorted or [np.zeros((_NUMBERS + 2, 0), np.int64)], axis=1)
        order = np.lexsort((numbers[2], numbers[1], numbers[0]))
        return numbers.take(order, axis=1)  # each column stays in one piece

    def _hand_over_singles(self, count: int) -> None:
        if count:
            rows, self._rows = self._rows[:count], self._rows[count:]
            self._add(dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)))
            del self._ended_ns[:count]
        self._pending, self._held_back = len(self._rows), 0


def _ends(leap: Leap, count: int) -> list[int]:
    return leap.ends_ns[:count]
