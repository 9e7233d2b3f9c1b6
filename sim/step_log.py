"""Rows of the dataset `steps`, in the order in which steps ended on all replicas.

A run of steady steps is one record until its rows are due: then numpy writes them out. A replica that leaps tells of
its steps when it lands, so what has ended since the earliest of the leaps under way began is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.schema import STEPS

_MEASURED_ONLY = (
    "schedule_ns", "prepare_ns", "launch_ns", "host_ns", "forward_ns", "sample_ns", "graph", "op_ns", "mask_ns",
    "thread_ns", "speed", "experts_hit", "expert_imbalance", "expert_tokens", "draft_ns", "row_accepted",
    "row_proposed", "heard_ns", "loaded_ids", "released_ids", "kv_attempts", "kv_transfers", "kv_attempts_in_flight",
)  # fmt: skip
_COLUMNS = [column.name for column in STEPS if column.name not in _MEASURED_ONLY]
_NUMBERS = _COLUMNS.index("row_ids")  # the columns before are numbers, and all others mostly null
_PLACES = {name: place for place, name in enumerate(_COLUMNS, 1)}
_NOTHING: tuple[Any, ...] = (None,) * (len(_COLUMNS) - _NUMBERS)
_NEVER = 1 << 62

Times = npt.NDArray[np.int64]


@dataclass(slots=True)
class SteadySteps:
    """A run of steps of one decode set on `replica`: when each was planned, began, and ended.

    turns_ns  when each was committed, if there was no other in flight; if there was, when the one before it was
    used      KV blocks referenced after each was planned
    row_ids   the requests in order, if anybody wants to know
    """

    replica: int
    plans_ns: Times
    starts_ns: Times
    ends_ns: Times
    turns_ns: Times
    rows: int
    context: int
    running: int
    waiting: int
    used: Times
    in_flight: int
    row_ids: list[int] | None


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
        self._runs: list[npt.NDArray[np.int64]] = []  # of others: when each ended, its numbers, and where the rest is
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

    def leapt(self, run: SteadySteps, waiting_blocks: int) -> None:
        """`run` has been taken, with so many blocks that those who wait would need; its last step may be in flight."""
        if run.in_flight:  # nothing is written before the steps after it are there, too
            self._commit(run.replica, int(run.turns_ns[0]))
        steps = len(run.ends_ns)
        first = self._next[run.replica]
        numbers = np.zeros((_NUMBERS + 2, steps), np.int64)
        columns: dict[str, Any] = {
            "replica": run.replica,
            "step": np.arange(first, first + steps),
            "plan_ns": run.plans_ns,
            "start_ns": run.starts_ns,
            "end_ns": run.ends_ns,
            "decode_rows": run.rows,
            "decode_context": run.context + run.rows * np.arange(steps),
            "sampled_rows": run.rows,
            "running": run.running,
            "waiting": run.waiting,
            "used_blocks": run.used,
            "waiting_blocks": waiting_blocks,
            "in_flight": run.in_flight,
        }
        for name, values in columns.items():
            numbers[_PLACES[name]] = values
        rest = _NOTHING
        if run.row_ids is not None:
            rest = (run.row_ids, [1] * run.rows, [], [], *_NOTHING[4:])
            numbers[-1] = len(self._rest)
            self._rest.append(rest)
        self._next[run.replica] = first + steps
        if run.in_flight:
            self._under_way[run.replica].append((*numbers[1:-1, -1].tolist(), *rest))
            numbers = numbers[:, :-1]
            numbers[0] = run.turns_ns[1:]
        else:
            numbers[0] = run.turns_ns
        self._runs.append(numbers)
        self._pending += numbers.shape[1]
        self._write_if_due()

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
        if not (self._runs or self._leaping):
            self._hand_over_singles(len(self._rows) // whole * whole)
            return
        numbers = self._sorted()
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
        self._runs = [numbers] if self._pending else []

    def _sorted(self) -> npt.NDArray[np.int64]:
        """All that is pending, in order of ends, replicas and steps."""
        if self._rows:
            singles = np.zeros((_NUMBERS + 2, len(self._rows)), np.int64)
            singles[0] = self._ended_ns
            singles[1:-1] = np.array([row[:_NUMBERS] for row in self._rows]).T
            for at, row in enumerate(self._rows):
                if row[_NUMBERS:] != _NOTHING:
                    singles[-1, at] = len(self._rest)
                    self._rest.append(row[_NUMBERS:])
            self._runs.append(singles)
            self._rows, self._ended_ns = [], []
        numbers = np.concatenate(self._runs, axis=1) if self._runs else np.zeros((_NUMBERS + 2, 0), np.int64)
        return numbers[:, np.lexsort((numbers[2], numbers[1], numbers[0]))]

    def _hand_over_singles(self, count: int) -> None:
        if count:
            rows, self._rows = self._rows[:count], self._rows[count:]
            self._add(dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)))
            del self._ended_ns[:count]
        self._pending, self._held_back = len(self._rows), 0
