"""The log of steps: a row for each, kept until it is written in the order in which steps ended on all replicas.

The steps of a leap are one row, that of the first of them, until numpy writes out the others. A replica that leaps
reports its steps when it lands, so rows of steps that have ended since the earliest of the leaps under way began are
held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serving.kv.block_pool import BlockPool
from serving.kv.contiguous_pool import longest_free
from serving.scheduler import Scheduler
from serving.step_plan import StepPlan
from sim.leap import Leap
from sim.step_times import StepTimes
from traces.schema import STEPS

Numbers = npt.NDArray[np.int64]

_MEASURED_ONLY = (
    "schedule_ns", "prepare_ns", "launch_ns", "host_ns", "forward_ns", "sample_ns", "graph", "op_ns", "mask_ns",
    "thread_ns", "speed", "experts_hit", "expert_imbalance", "expert_tokens", "draft_ns", "row_accepted",
    "row_proposed", "heard_ns", "loaded_ids", "released_ids", "kv_attempts", "kv_transfers", "kv_attempts_in_flight",
)  # fmt: skip
_MOSTLY_NULL = ("draft_tokens", "stages_ns", "masked_rows", "longest_free_blocks")
_COLUMNS = {column.name: column.type for column in STEPS if column.name not in _MEASURED_ONLY}
_NUMBERS = {
    name: kind.to_pandas_dtype()
    for name, kind in _COLUMNS.items()
    if pa.types.is_integer(kind) and name not in _MOSTLY_NULL
}
_OF_EACH_STEP = ("step", "plan_ns", "start_ns", "end_ns", "decode_context", "used_blocks", "taken_ns")
_AT_ONCE = 512  # rows that become columns while a processor's cache holds them
_NO_IDS: list[int] = []
_NEVER = 1 << 62


class StepRow:
    """A row of the dataset `steps`, or the first of several. Columns are attributes: `traces.schema` defines them.

    Attributes:
        taken_ns: when the step was taken in, which is after `end_ns` if another was being planned then
        steps: how many rows it stands for: those of so many steps of `leap`, from its first on
        leap: the leap that the row begins, if any
        row_tokens: None also stands for one token of each request, but only where replicas may leap
        crossings: by how much `used_blocks` grows at each step of the leap; after the last the numbers repeat
    """

    replica: int
    step: int
    plan_ns: int
    start_ns: int
    end_ns: int
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    prefill_pairs: int = 0
    decode_rows: int
    decode_context: int
    sampled_rows: int
    running: int
    waiting: int
    used_blocks: int
    waiting_blocks: int
    preempted: int = 0
    in_flight: int
    row_ids: list[int] | None = None
    row_tokens: list[int] | None = None
    preempted_ids: list[int] | None = None
    stopped_ids: list[int] | None = None
    draft_tokens: int | None = None
    stages_ns: list[int] | None = None
    masked_rows: int | None = None
    longest_free_blocks: int | None = None

    taken_ns: int = 0
    steps: int = 1
    leap: Leap | None = None
    crossings: list[int]  # undefined without a leap

    def __init__(self, replica: int, scheduler: Scheduler, waiting_blocks: int) -> None:
        """Fill in what the scheduler of `replica` knows; requests that wait would need `waiting_blocks`."""
        self.replica = replica
        self.running = len(scheduler.running)
        self.waiting = len(scheduler.waiting)
        self.used_blocks = scheduler.pool.total - scheduler.pool.free
        self.waiting_blocks = waiting_blocks

    @property
    def is_usual(self) -> bool:
        """True if the columns that are null in most runs are null."""
        return (
            self.draft_tokens is None
            and self.stages_ns is None
            and self.masked_rows is None
            and self.longest_free_blocks is None
        )


class StepLog:
    """A log that gives rows to `add`, `block` at once.

    Attributes:
        lists: whether the requests of each step are kept
        leaps: whether any replica may leap; if not, columns are tuples of Python's own values
    """

    def __init__(
        self, add: Callable[[Mapping[str, Sequence[Any]]], None], block: int, lists: bool, leaps: bool
    ) -> None:
        self._add = add
        self._block = block
        self._lists = lists
        self._leaps = leaps
        self._in_flight: dict[int, deque[StepRow]] = {}
        self._next_step: dict[int, int] = {}
        self._leaps_began_ns: dict[int, int] = {}  # leaps under way, by replica
        self._ended: list[StepRow] = []  # in the order in which they were taken in on their replicas
        self._tables: list[StepTable] = []  # with leaps, what ended before
        self._pending = 0  # steps that have ended and are not written
        self._held_back = 0  # rows that were not due when rows were last written

    def planned(
        self,
        replica: int,
        scheduler: Scheduler,
        plan: StepPlan,
        plan_ns: int,
        start_ns: int,
        end_ns: int,
        waiting_blocks: int,
        stages_ns: list[int] | None,
    ) -> None:
        row = StepRow(replica, scheduler, waiting_blocks)
        row.step = plan.seq
        row.plan_ns = plan_ns
        row.start_ns = start_ns
        row.end_ns = end_ns
        row.prefill_rows = plan.prefill_rows
        row.prefill_tokens = plan.prefill_tokens
        row.prefill_context = plan.prefill_context
        row.prefill_pairs = plan.prefill_pairs
        row.decode_rows = plan.decode_rows
        row.decode_context = plan.decode_context
        row.sampled_rows = plan.sampled_rows
        row.preempted = len(plan.preempted)
        row.in_flight = plan.lag
        if self._lists:
            row.row_ids, tokens = plan.ids_and_tokens()
            if not self._leaps or plan.prefill_rows or plan.draft_tokens:
                row.row_tokens = tokens
            row.preempted_ids = [request.id for request in plan.preempted] if plan.preempted else _NO_IDS
            row.stopped_ids = _NO_IDS
        row.draft_tokens = plan.draft_tokens or None
        row.stages_ns = stages_ns
        row.masked_rows = plan.masked_rows or None
        row.longest_free_blocks = longest_free(scheduler.pool)
        self._launch(row)

    def _launch(self, row: StepRow) -> None:
        self._in_flight.setdefault(row.replica, deque()).append(row)
        self._next_step[row.replica] = row.step + 1

    def committed(self, replica: int, now_ns: int) -> None:
        self._commit(replica, now_ns)
        self._write_if_due()

    def _commit(self, replica: int, now_ns: int) -> None:
        row = self._in_flight[replica].popleft()
        row.taken_ns = now_ns
        self._end(row)

    def _end(self, row: StepRow) -> None:
        self._ended.append(row)
        self._pending += row.steps
        if self._leaps and len(self._ended) >= _AT_ONCE:
            self._tabulate()

    def leaps(self, replica: int, now_ns: int) -> None:
        """Hold rows back from now on: the replica's steps are known when it lands."""
        self._leaps_began_ns[replica] = now_ns

    def lands(self, replica: int) -> None:
        self._leaps_began_ns.pop(replica, None)

    def leapt(self, replica: int, scheduler: Scheduler, leap: Leap, steps: int, waiting_blocks: int) -> None:
        """Log the first `steps` steps of `leap`, which `scheduler` is about to take; the last may be in flight then."""
        decodes, pool = scheduler.decodes, scheduler.pool
        ids = decodes.ids(list(decodes.members.values())) if self._lists else None
        first = self._next_step[replica]
        if leap.overlaps:
            self._commit(replica, leap.turn_ns(0))
            steps -= 1
            last = self._steady_row(replica, scheduler, leap, steps, waiting_blocks, ids)
            last.step = first + steps
            last.used_blocks += pool.ahead(decodes, steps + 1)
            self._launch(last)
        else:
            self._next_step[replica] = first + steps
        if steps:
            assert isinstance(pool, BlockPool)  # else no replica leaps if steps are kept
            row = self._steady_row(replica, scheduler, leap, 0, waiting_blocks, ids)
            row.step = first
            row.crossings = pool.ahead_by_tick(decodes, steps + 1)
            row.used_blocks += row.crossings[0]
            row.leap = leap
            row.steps = steps
            self._end(row)
            self._write_if_due()

    def _steady_row(
        self, replica: int, scheduler: Scheduler, leap: Leap, step: int, waiting_blocks: int, ids: list[int] | None
    ) -> StepRow:
        """Return the row of a step of `leap`, but for its number and its blocks."""
        decodes = scheduler.decodes
        row = StepRow(replica, scheduler, waiting_blocks)
        row.plan_ns = leap.plan_ns(step)
        row.start_ns = leap.start_ns(step)
        row.end_ns = leap.end_ns(step)
        row.decode_rows = row.sampled_rows = len(decodes.members)
        row.decode_context = decodes.context + step * row.decode_rows
        row.in_flight = 1 if leap.overlaps else 0
        if ids is not None:
            row.row_ids = ids
            row.preempted_ids = row.stopped_ids = _NO_IDS
        return row

    def crashed(self, replica: int) -> None:
        """Drop the steps of a replica in flight, which never end."""
        self._in_flight.pop(replica, None)
        self._leaps_began_ns.pop(replica, None)

    def close(self) -> None:
        """Hand over all rows; a step that is in flight when the last request ends runs for nothing."""
        self._leaps_began_ns.clear()
        for replica, rows in self._in_flight.items():
            while rows:
                self._commit(replica, rows[0].end_ns)
        self._write(_NEVER, 1)

    def _write_if_due(self) -> None:
        if self._pending >= self._block + self._held_back:
            self._write(min(self._leaps_began_ns.values(), default=_NEVER), self._block)

    def _write(self, before_ns: int, whole: int) -> None:
        """Hand over the rows of steps that were taken in before `before_ns`, a multiple of `whole`."""
        if not self._pending:
            return
        if self._leaps:
            self._tabulate()
            table = _joined(self._tables)
            self._tables.clear()
            order = table.in_order()
            due = int(np.searchsorted(table.by_step["taken_ns"][order], before_ns)) // whole * whole
            for begin in range(0, due, self._block):
                self._add(table.columns(order[begin : min(begin + self._block, due)]))
            if due < len(order):
                self._tables.append(table.only(np.sort(order[due:])))
            self._pending = self._held_back = len(order) - due
        else:
            due = self._pending // whole * whole
            values = map(attrgetter(*_COLUMNS), self._ended[:due])
            self._add(dict(zip(_COLUMNS, zip(*values, strict=True), strict=True)))
            del self._ended[:due]
            self._pending -= due

    def _tabulate(self) -> None:
        if self._ended:
            self._tables.append(_table(self._ended, self._lists))
            self._ended.clear()


@dataclass(frozen=True)
class StepTable:
    """Steps that have ended, each of a leap by itself.

    Attributes:
        row: by step, its place in what is kept by row
        by_step: columns that differ within a leap, and `taken_ns`
        by_row: the other columns that are never null
        lists: the columns that list requests, by row, if they are kept
        others: the columns that are null in most runs, by row
        has_others: whether any of them is not null, by row
    """

    row: Numbers
    by_step: dict[str, Numbers]
    by_row: dict[str, Numbers]
    lists: dict[str, pa.ListArray]
    others: dict[str, Numbers]
    has_others: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.row)

    def in_order(self) -> Numbers:
        """Return the places of all steps, in the order in which they were taken in, and of replicas."""
        return np.lexsort((self.by_row["replica"].take(self.row), self.by_step["taken_ns"]))

    def columns(self, places: Numbers) -> dict[str, Any]:
        """Return the columns of the dataset for the steps in these places."""
        row = self.row[places]
        columns: dict[str, Any] = {name: numbers.take(row) for name, numbers in self.by_row.items()}
        columns |= {name: numbers.take(places) for name, numbers in self.by_step.items() if name != "taken_ns"}
        for name, lists in self.lists.items():
            taken = lists.take(pa.array(row))
            columns[name] = pa.ListArray.from_arrays(taken.offsets, taken.values)  # without a mask that hides nothing
        if self.has_others[row].any():  # else the other columns are null
            columns |= {name: values[row].tolist() for name, values in self.others.items()}
        return columns

    def only(self, places: Numbers) -> StepTable:
        """Return the steps in these places."""
        rows, row = np.unique(self.row[places], return_inverse=True)
        return StepTable(
            row,
            {name: numbers[places] for name, numbers in self.by_step.items()},
            {name: numbers[rows] for name, numbers in self.by_row.items()},
            {name: lists.take(pa.array(rows)) for name, lists in self.lists.items()},
            {name: values[rows] for name, values in self.others.items()},
            self.has_others[rows],
        )


def _joined(tables: list[StepTable]) -> StepTable:
    """Return the steps of all tables, one table behind the other."""
    first = tables[0]
    rows = np.cumsum([0, *(len(table.has_others) for table in tables)])
    return StepTable(
        np.concatenate([table.row + begin for table, begin in zip(tables, rows[:-1], strict=True)]),
        {name: np.concatenate([table.by_step[name] for table in tables]) for name in first.by_step},
        {name: np.concatenate([table.by_row[name] for table in tables]) for name in first.by_row},
        {name: pa.concat_arrays([table.lists[name] for table in tables]) for name in first.lists},
        {name: np.concatenate([table.others[name] for table in tables]) for name in first.others},
        np.concatenate([table.has_others for table in tables]),
    )


def _table(rows: list[StepRow], lists: bool) -> StepTable:
    """Return the steps of `rows`."""
    by_row = {name: np.array(values, _NUMBERS.get(name, np.int64)) for name, values in _numbers(rows).items()}
    steps = by_row.pop("steps")
    row = np.repeat(np.arange(len(rows)), steps)
    by_step = {name: by_row.pop(name).take(row) for name in _OF_EACH_STEP}
    later = np.arange(len(row)) - np.repeat(np.cumsum(steps) - steps, steps)
    by_step["step"] += later
    by_step["decode_context"] += later * by_row["decode_rows"].take(row)
    _expand_leaps(rows, steps, by_step)
    others = {name: np.fromiter(map(attrgetter(name), rows), object, len(rows)) for name in _MOSTLY_NULL}
    has_others = np.array([not row.is_usual for row in rows], np.bool_)
    return StepTable(row, by_step, by_row, _lists(rows) if lists else {}, others, has_others)


def _expand_leaps(rows: list[StepRow], steps: Numbers, by_step: dict[str, Numbers]) -> None:
    """Give each step of a leap its own times and blocks; each row stands for so many `steps`."""
    plans, starts, ends, commits = StepTimes(), StepTimes(), StepTimes(), StepTimes()
    used_blocks: list[int] = []
    leaps = [False] * len(rows)
    for place, row in enumerate(rows):
        leap = row.leap
        if leap is not None:
            leaps[place] = True
            leap.add_plans(plans, row.steps)
            leap.add_starts(starts, row.steps)
            leap.add_ends(ends, row.steps)
            leap.add_commits(commits, row.steps)
            used_blocks += accumulate(islice(cycle(row.crossings), 1, row.steps), initial=row.used_blocks)
    if used_blocks:
        places = np.flatnonzero(np.repeat(np.array(leaps, np.bool_), steps))
        by_step["plan_ns"][places] = plans.array()
        by_step["start_ns"][places] = starts.array()
        by_step["end_ns"][places] = ends.array()
        by_step["used_blocks"][places] = used_blocks
        by_step["taken_ns"][places] = commits.array()


def _numbers(rows: list[StepRow]) -> dict[str, list[int]]:
    """Return the columns of `rows` that are never null, when they were taken in, and how many steps each stands for."""
    return {
        "replica": [row.replica for row in rows],
        "step": [row.step for row in rows],
        "plan_ns": [row.plan_ns for row in rows],
        "start_ns": [row.start_ns for row in rows],
        "end_ns": [row.end_ns for row in rows],
        "prefill_rows": [row.prefill_rows for row in rows],
        "prefill_tokens": [row.prefill_tokens for row in rows],
        "prefill_context": [row.prefill_context for row in rows],
        "prefill_pairs": [row.prefill_pairs for row in rows],
        "decode_rows": [row.decode_rows for row in rows],
        "decode_context": [row.decode_context for row in rows],
        "sampled_rows": [row.sampled_rows for row in rows],
        "running": [row.running for row in rows],
        "waiting": [row.waiting for row in rows],
        "used_blocks": [row.used_blocks for row in rows],
        "waiting_blocks": [row.waiting_blocks for row in rows],
        "preempted": [row.preempted for row in rows],
        "in_flight": [row.in_flight for row in rows],
        "taken_ns": [row.taken_ns for row in rows],
        "steps": [row.steps for row in rows],
    }


def _lists(rows: list[StepRow]) -> dict[str, pa.ListArray]:
    """Return the columns of `rows` that list requests."""
    ids = _list_array([row.row_ids or _NO_IDS for row in rows])
    return {
        "row_ids": ids,
        "row_tokens": pa.ListArray.from_arrays(ids.offsets, pa.array(_tokens(rows, len(ids.values)))),
        "preempted_ids": _list_array([row.preempted_ids or _NO_IDS for row in rows]),
        "stopped_ids": _list_array([row.stopped_ids or _NO_IDS for row in rows]),
    }


def _tokens(rows: list[StepRow], requests: int) -> npt.NDArray[np.int32]:
    """Return the tokens of all requests, which are as many as `requests`. As a rule it is one."""
    places: list[int] = []
    more: list[int] = []
    first = 0
    for row in rows:
        if row.row_tokens is not None:
            for place, tokens in enumerate(row.row_tokens, first):
                if tokens != 1:
                    places.append(place)
                    more.append(tokens)
        first += 0 if row.row_ids is None else len(row.row_ids)
    array = np.ones(requests, np.int32)
    array[np.array(places, np.int64)] = more
    return array


def _list_array(lists: list[list[int]]) -> pa.ListArray:
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, lists), np.int32, len(lists)), out=offsets[1:])
    numbers = np.fromiter(chain.from_iterable(lists), np.int64, offsets[-1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers))
