"""The record of every step, kept until it is written in the order in which steps ended on all replicas.

A run of steady steps is one record until its rows are due: see `sim.step_rows`. A replica that leaps reports its steps
when it lands, so steps that have ended since the earliest of the leaps under way began are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.kv.block_pool import BlockPool
from serving.scheduler import Scheduler
from sim.leap import Leap
from sim.step_rows import COLUMNS, LISTS, NUMBERS, Records, StepRows, listed, mostly_ones

_NOTHING: tuple[Any, ...] = (None,) * (len(COLUMNS) - NUMBERS - LISTS)
_NEVER = 1 << 62
_END_NS = COLUMNS.index("end_ns")


class StepLog:
    """A log that gives rows to `add`, `block` at once.

    Attributes:
        lists: whether the requests of each step are kept
        leaps: whether any replica may leap; if not, each row is a tuple of Python's own until it is given
    """

    def __init__(
        self, add: Callable[[Mapping[str, Sequence[Any]]], None], block: int, lists: bool, leaps: bool
    ) -> None:
        self._add = add
        self._block = block
        self._lists = lists
        self._leaps = leaps
        self._under_way: dict[int, deque[tuple[Any, ...]]] = {}  # rows of steps in flight
        self._next: dict[int, int] = {}  # number of the next step of each replica
        self._leaping: dict[int, int] = {}  # begin of each leap under way
        self._singles: list[tuple[Any, ...]] = []  # rows of steps that have ended, without leaps
        self._rows = StepRows(add, block, lists)
        self._rest: list[tuple[Any, ...]] = [_NOTHING]
        self._pending = self._held_back = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without records. See `Records`; times are in pieces here, and tokens other than 1 follow a place."""
        self._numbers: list[int] = []
        self._turns: list[int] = []
        self._ends: list[int] = []
        self._crossings: list[int] = []
        self._ids: list[int] = []
        self._tokens: list[int] = []
        self._preempted: list[int] = []

    def planned(self, replica: int, row: tuple[Any, ...]) -> None:
        self._under_way.setdefault(replica, deque()).append(row)
        self._next[replica] = row[1] + 1

    def committed(self, replica: int, now_ns: int) -> None:
        self._commit(replica, now_ns)
        self._write_if_due()

    def _commit(self, replica: int, now_ns: int) -> None:
        row = self._under_way[replica].popleft()
        self._pending += 1
        if not self._leaps:
            self._singles.append(row)
            return
        requests, place = 0, 0
        if self._lists:
            ids, tokens, preempted, _ = row[NUMBERS : NUMBERS + LISTS]
            requests, first = len(ids), len(self._ids)
            self._ids += ids
            for at, count in enumerate(tokens):
                if count != 1:
                    self._tokens += (first + at, count)
            self._preempted += preempted
        rest = row[NUMBERS + LISTS :]
        if rest != _NOTHING:
            place = len(self._rest)
            self._rest.append(rest)
        self._numbers += row[:NUMBERS]
        self._numbers += (now_ns, 1, 0, 0, 0, requests, place)

    def leaps(self, replica: int, now_ns: int) -> None:
        """Hold rows back from now on: the replica's steps are known when it lands."""
        self._leaping[replica] = now_ns

    def lands(self, replica: int) -> None:
        self._leaping.pop(replica, None)

    def leapt(self, replica: int, scheduler: Scheduler, leap: Leap, steps: int, waiting_blocks: int) -> None:
        """Log the first `steps` steps of `leap`, which `scheduler` is about to take; the last may be in flight then.

        Requests that wait would need `waiting_blocks`.
        """
        decodes, pool = scheduler.decodes, scheduler.pool
        rows, step, overlaps = len(decodes.members), self._next[replica], leap.overlaps
        ids = decodes.ids(list(decodes.members.values())) if self._lists else []
        self._next[replica] = step + steps
        used = pool.total - pool.free
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        if overlaps:  # rows are not written before the steps after them are there, too
            self._commit(replica, leap.turn_ns(0))
            steps -= 1
            times = leap.plan_ns(steps), leap.start_ns(steps), leap.end_ns(steps)
            context, ahead = decodes.context + rows * steps, pool.net_blocks(decodes, steps + 1)
            last = replica, step + steps, *times, 0, 0, 0, 0, rows, context, rows, running, waiting, used + ahead
            lists: tuple[Any, ...] = (ids, [1] * rows, [], []) if self._lists else (None, None, None, None)
            self._under_way[replica].append((*last, waiting_blocks, 0, 1, *lists, *_NOTHING))
        if not steps:
            return
        assert isinstance(pool, BlockPool)  # else no replica leaps if steps are kept
        crossings = pool.net_blocks_by_tick(decodes, steps + 1)
        self._numbers += (replica, step, 0, leap.cpu_ns, 0, 0, 0, 0, 0, rows, decodes.context, rows, running, waiting)
        self._numbers += (
            used,
            waiting_blocks,
            0,
            overlaps,
            0,
            steps,
            overlaps,
            leap.listed,
            len(crossings),
            len(ids),
            0,
        )
        self._turns += leap.turn_pieces(steps + overlaps)
        if leap.listed:
            self._ends += leap.end_pieces(steps)
        self._crossings += crossings
        self._ids += ids
        self._pending += steps
        self._write_if_due()

    def crashed(self, replica: int) -> None:
        """Drop the steps of a replica in flight, which never end."""
        self._under_way.pop(replica, None)
        self._leaping.pop(replica, None)

    def close(self) -> None:
        """Hand over all rows; a step that is in flight when the last request ends runs for nothing."""
        self._leaping.clear()
        for replica, rows in self._under_way.items():
            while rows:
                self._commit(replica, rows[0][_END_NS])
        self._write(_NEVER, 1)

    def _write_if_due(self) -> None:
        if self._pending >= self._block + self._held_back:
            self._write(min(self._leaping.values(), default=_NEVER), self._block)

    def _write(self, before_ns: int, whole: int) -> None:
        """Hand over the rows of steps that ended before `before_ns`, a multiple of `whole`."""
        if not self._pending:
            return
        if not self._leaps:
            due = self._pending // whole * whole
            rows, self._singles = self._singles[:due], self._singles[due:]
            self._add(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))
            self._pending -= due
            return
        times = listed(self._turns), listed(self._ends)
        lists = self._ids, mostly_ones(len(self._ids), self._tokens), self._preempted
        self._rows.take(Records(self._numbers, *times, self._crossings, *lists))  # no turns of single steps
        self._begin()
        self._rest = self._rows.give(before_ns, whole, self._rest)
        self._pending = self._held_back = self._rows.pending
