"""The log of steps. Each step has a row; rows are written in the order in which steps of all replicas ended.

A leap is a run of decode steps that a replica simulates at once. Its steps share one row in memory, from which numpy
makes all rows when they are written. A replica reports the steps of a leap only when the leap ends. So rows of steps
that ended after the begin of any unfinished leap are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, cycle, islice
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokentwin.serving.kv.block_pool import BlockPool
from tokentwin.serving.kv.contiguous_pool import longest_free
from tokentwin.serving.scheduler import Scheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.sim.leap import Leap
from tokentwin.traces.schema import STEPS

_MEASURED_ONLY = (
    "schedule_ns", "prepare_ns", "launch_ns", "host_ns", "forward_ns", "sample_ns", "graph", "op_ns", "mask_ns",
    "thread_ns", "speed", "experts_hit", "expert_imbalance", "expert_tokens", "draft_ns", "row_accepted",
    "row_proposed", "heard_ns", "loaded_ids", "released_ids", "kv_attempts", "kv_transfers", "kv_attempts_in_flight",
    "adapters",
)  # fmt: skip
_MOSTLY_NULL = (
    "row_ids", "row_tokens", "preempted_ids", "stopped_ids", "draft_tokens", "stages_ns", "masked_rows",
    "longest_free_blocks",
)  # fmt: skip
_NUMBERS = [column.name for column in STEPS if column.name not in _MEASURED_ONLY + _MOSTLY_NULL]
_NOT_WRITTEN = ["taken_ns", "steps"]
_TYPES = {column.name: column.type for column in STEPS}
_OF_EACH_STEP = ("plan_ns", "start_ns", "end_ns", "used_blocks", "taken_ns")
# number of rows that are turned into columns together, so few that they are still in the processor's cache
_AT_ONCE = 512
_NO_IDS: list[int] = []
_NEVER = 1 << 62

Numbers = npt.NDArray[np.int64]


class StepRow:
    """A row of the dataset `steps`, or the first row of a leap. Columns are attributes: `traces.schema` defines them.

    Attributes:
        taken_ns: time at which the engine handled the end of the step: later than `end_ns` if it was planning another
            step
        steps: number of steps of a leap that the row stands for
        leap: columns whose values differ from step to step of the leap, except `step` and `decode_context`, which are
            computed
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
    used_blocks: int = 0
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
    leap: dict[str, list[int]] | None = None

    def __init__(self, replica: int, step: int, plan_ns: int, start_ns: int, end_ns: int) -> None:
        self.replica = replica
        self.step = step
        self.plan_ns = plan_ns
        self.start_ns = start_ns
        self.end_ns = end_ns

    def columns(self) -> dict[str, list[Any]]:
        """Return the row as columns with one value each, without columns that are null."""
        columns = {name: [getattr(self, name)] for name in _NUMBERS}
        for name in _MOSTLY_NULL:
            if (value := getattr(self, name)) is not None:
                columns[name] = [value]
        return columns


class StepLog:
    """A log that passes `block` rows at once to `add`.

    Attributes:
        lists: True if the requests of each step are recorded
        leaps: True if a replica may leap; if False, steps are reported in the order in which their rows are written
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
        self._leaps_began_ns: dict[int, int] = {}  # begin of each unfinished leap, by replica
        self._ended: list[StepRow] = []
        self._tabulated = 0  # number of leading rows of `_ended` that are in `_tables`
        self._tables: list[dict[str, Numbers]] = []
        self._pending = 0  # number of steps that have ended and are not written
        self._held_back = 0  # number of steps that had to be held back when rows were last written

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
        """Log a step; `waiting_blocks` is the number of blocks that waiting requests would need."""
        row = StepRow(replica, plan.seq, plan_ns, start_ns, end_ns)
        row.prefill_rows = plan.prefill_rows
        row.prefill_tokens = plan.prefill_tokens
        row.prefill_context = plan.prefill_context
        row.prefill_pairs = plan.prefill_pairs
        row.decode_rows = plan.decode_rows
        row.decode_context = plan.decode_context
        row.sampled_rows = plan.sampled_rows
        row.running = len(scheduler.running)
        row.waiting = len(scheduler.waiting)
        row.used_blocks = scheduler.pool.total - scheduler.pool.free
        row.waiting_blocks = waiting_blocks
        row.preempted = len(plan.preempted)
        row.in_flight = plan.lag
        if self._lists:
            row.row_ids, row.row_tokens = plan.ids_and_tokens()
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
        if self._block == 1 and not self._leaps:  # a live run writes each row at once
            self._add(row.columns())
            return
        self._ended.append(row)
        self._pending += row.steps
        if len(self._ended) >= self._tabulated + _AT_ONCE:
            self._tabulate()

    def _tabulate(self) -> None:
        table = _table(self._ended[self._tabulated :])
        table["row"] += self._tabulated
        self._tables.append(table)
        self._tabulated = len(self._ended)

    def leaps(self, replica: int, now_ns: int) -> None:
        """Hold rows back from now on, because the replica reports its next steps only when its leap ends."""
        self._leaps_began_ns[replica] = now_ns

    def lands(self, replica: int) -> None:
        self._leaps_began_ns.pop(replica, None)

    def leapt(self, replica: int, scheduler: Scheduler, leap: Leap, steps: int, waiting_blocks: int) -> None:
        """Log the first `steps` steps of `leap`, which `scheduler` is about to take.

        In the overlapped loop the last of these steps is then in flight.
        """
        pool = scheduler.pool
        assert isinstance(pool, BlockPool)  # with any other pool, no replica leaps if steps are recorded
        crossings = cycle(pool.net_blocks_by_tick(scheduler.decodes, steps))
        used_blocks = list(islice(accumulate(crossings, initial=pool.total - pool.free), 1, steps + 1))
        turns_ns = leap.turns_ns(steps)
        plans_ns = [leap.began_ns, *turns_ns[:-1]]
        row = self._steady_row(replica, scheduler, leap, 0, waiting_blocks)
        if leap.overlaps:
            last = self._steady_row(replica, scheduler, leap, steps - 1, waiting_blocks)
            last.used_blocks = used_blocks.pop()
            self._commit(replica, turns_ns[0])
            self._launch(last)
            plans_ns.pop()
            starts_ns, taken_ns = turns_ns[:-1], turns_ns[1:]
        else:
            self._next_step[replica] += steps
            starts_ns, taken_ns = [ns + leap.cpu_ns for ns in plans_ns], turns_ns
        row.steps = len(used_blocks)
        row.leap = {
            "plan_ns": plans_ns,
            "start_ns": starts_ns,
            "end_ns": leap.ends_ns(row.steps),
            "used_blocks": used_blocks,
            "taken_ns": taken_ns,
        }
        if row.steps:
            self._end(row)
            self._write_if_due()

    def _steady_row(self, replica: int, scheduler: Scheduler, leap: Leap, step: int, waiting_blocks: int) -> StepRow:
        """Return the row of step `step` of `leap`, without its columns about blocks."""
        decodes, seq = scheduler.decodes, self._next_step[replica] + step
        row = StepRow(replica, seq, leap.plan_ns(step), leap.start_ns(step), leap.end_ns(step))
        row.decode_rows = row.sampled_rows = len(decodes.members)
        row.decode_context = decodes.context + step * row.decode_rows
        row.running = len(scheduler.running)
        row.waiting = len(scheduler.waiting)
        row.waiting_blocks = waiting_blocks
        row.in_flight = 1 if leap.overlaps else 0
        if self._lists:
            row.row_ids = decodes.ids(list(decodes.members.values()))
            row.row_tokens = [1] * row.decode_rows
            row.preempted_ids = row.stopped_ids = _NO_IDS
        return row

    def crashed(self, replica: int) -> None:
        """Drop the steps of a replica in flight, which never end."""
        self._in_flight.pop(replica, None)
        self._leaps_began_ns.pop(replica, None)

    def close(self) -> None:
        """Write all rows. A step that is still in flight computes nothing for any request, because all have ended."""
        self._leaps_began_ns.clear()
        for replica, rows in self._in_flight.items():
            while rows:
                self._commit(replica, rows[0].end_ns)
        self._write(_NEVER, 1)

    def _write_if_due(self) -> None:
        if self._pending >= self._block + self._held_back:
            self._write(min(self._leaps_began_ns.values(), default=_NEVER), self._block)

    def _write(self, before_ns: int, whole: int) -> None:
        """Write rows of steps with `taken_ns` below `before_ns`; their number is a multiple of `whole`."""
        self._tabulate()
        table = {name: np.concatenate([table[name] for table in self._tables]) for name in self._tables[0]}
        order = np.arange(self._pending)
        if self._leaps:
            order = np.lexsort((table["replica"], table["taken_ns"]))
        due = int(np.searchsorted(table["taken_ns"][order], before_ns)) // whole * whole
        for first in range(0, due, self._block):
            places = order[first : min(first + self._block, due)]
            self._add(_columns({name: column[places] for name, column in table.items()}, self._ended))
        rest = np.sort(order[due:])
        table = {name: column[rest] for name, column in table.items()}
        rows, table["row"] = np.unique(table["row"], return_inverse=True)
        self._tables = [table]
        self._ended = [self._ended[row] for row in rows.tolist()]
        self._tabulated = len(rows)
        self._pending = self._held_back = len(rest)


def _table(rows: list[StepRow]) -> dict[str, Numbers]:
    """Return the values of all steps that `rows` stand for, by column; the column `row` is the index in `rows`."""
    names = _NUMBERS + _NOT_WRITTEN
    columns = {name: np.fromiter(map(attrgetter(name), rows), np.int64, len(rows)) for name in names}
    columns["row"] = np.arange(len(rows))
    steps = columns.pop("steps")
    table = {name: numbers.repeat(steps) for name, numbers in columns.items()}
    later = np.arange(steps.sum()) - (steps.cumsum() - steps).repeat(steps)
    table["step"] += later
    table["decode_context"] += later * table["decode_rows"]
    leaps = [row.leap for row in rows if row.leap is not None]
    if leaps:
        leapt = np.array([row.leap is not None for row in rows]).repeat(steps)
        for name in _OF_EACH_STEP:
            table[name][leapt] = np.fromiter(chain.from_iterable(map(itemgetter(name), leaps)), np.int64)
    return table


def _columns(table: dict[str, Numbers], rows: list[StepRow]) -> dict[str, Any]:
    """Return the columns of the dataset for the steps of `table`, without columns that are always null."""
    columns: dict[str, Any] = {name: table[name] for name in _NUMBERS}
    places, row = np.unique(table["row"], return_inverse=True)
    rows = [rows[place] for place in places.tolist()]
    for name in _MOSTLY_NULL:
        values = list(map(attrgetter(name), rows))
        if values.count(None) < len(values):
            columns[name] = pa.array(values, _TYPES[name]).take(pa.array(row))
    return columns
