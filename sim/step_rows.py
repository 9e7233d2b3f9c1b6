"""Rows of the dataset `steps` out of records: each is one step, or a run of steady ones that numpy writes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traces.schema import STEPS

_MEASURED_ONLY = (
    "schedule_ns", "prepare_ns", "launch_ns", "host_ns", "forward_ns", "sample_ns", "graph", "op_ns", "mask_ns",
    "thread_ns", "speed", "experts_hit", "expert_imbalance", "expert_tokens", "draft_ns", "row_accepted",
    "row_proposed", "heard_ns", "loaded_ids", "released_ids", "kv_attempts", "kv_transfers", "kv_attempts_in_flight",
)  # fmt: skip
COLUMNS = [column.name for column in STEPS if column.name not in _MEASURED_ONLY]
NUMBERS = COLUMNS.index("row_ids")  # the columns before are numbers, and all others mostly null
LISTS = 4  # number of columns of lists, which come next
RECORD = NUMBERS + 7
"""Numbers of a record: the columns at its first step, then when that step was taken in, the record's steps, how many
steps were in flight in a leap, whether its ends are told, its block size, how many requests it lists, and where the
rest is. In a leap `start_ns` is the CPU time of each plan, and the other times are 0.
"""
_TAKEN, _STEPS, _BEHIND, _TOLD, _BLOCK_SIZE, _LISTED, _REST = range(NUMBERS, RECORD)
_AT = {name: at for at, name in enumerate(COLUMNS)}
_TIMES = ("plan_ns", "start_ns", "end_ns")
_AS_IS = {
    c.name: c.type.to_pandas_dtype() for c in STEPS if _AT.get(c.name, NUMBERS) < NUMBERS and c.name not in _TIMES
}
_NO_BLOCKS = 1 << 40  # the block size of a record that crosses into none

Numbers = npt.NDArray[np.int64]


def listed(pieces: Sequence[int]) -> Numbers:
    """Return times in pieces `(base_ns, first_ps, growth_ps, count)`, one number behind the other.

    Time i of a piece is `(first_ps + i * growth_ps) // 1000` nanoseconds after the one before, or after `base_ns`.
    """
    base_ns, first_ps, growth_ps, count = np.array(pieces, np.int64).reshape(-1, 4).T
    begins = _begins(count)
    ns = np.repeat(growth_ps, count)
    ns *= np.arange(len(ns))
    ns += np.repeat(first_ps - growth_ps * begins, count)
    ns //= 1000
    sums = np.cumsum(ns)
    sums += np.repeat(base_ns - sums[begins] + ns[begins], count)
    return sums


def mostly_ones(count: int, others: Sequence[int]) -> Numbers:
    """Return `count` numbers: 1, but for `others`, each of which follows its place."""
    ones = np.ones(count, np.int64)
    places, numbers = np.array(others, np.int64).reshape(-1, 2).T
    ones[places] = numbers
    return ones


@dataclass
class Records:
    """Several records: their numbers, one behind the other, and their parts that differ in length.

    Attributes:
        turns: when the first step was planned, and when each was taken in and the next was planned
        ends: when each step ended, in records that list ends; in others that is when it was taken in
        crossings: for a leap, members that cross into a new block at each tick, over the size of a block
        ids: requests in each step, if they are kept
        tokens: how many tokens of each request, if they are kept
        preempted: requests preempted, if they are kept
    """

    numbers: Sequence[int] | Numbers
    turns: Sequence[int] | Numbers
    ends: Sequence[int] | Numbers
    crossings: Sequence[int] | Numbers
    ids: Sequence[int] | Numbers
    tokens: Sequence[int] | Numbers
    preempted: Sequence[int] | Numbers


class StepRows:
    """The rows given to `add`, `block` at once, in the order in which steps were taken in, and of replicas.

    Attributes:
        listed: whether the requests of each step are kept
        pending: rows not given yet
    """

    def __init__(self, add: Callable[[Mapping[str, Any]], None], block: int, listed: bool) -> None:
        self.pending = 0
        self._add = add
        self._block = block
        self._listed = listed
        self._held: list[Records] = []
        self._begun = np.zeros(0, np.int64)  # rows given so far of each held record

    def take(self, records: Records) -> None:
        """Take more records, with turns of leaps only; records of one replica come in the order of their steps."""
        arrays = [np.asarray(getattr(records, field.name), np.int64) for field in fields(Records)]
        numbers = arrays[0].reshape(-1, RECORD).T
        lengths, single = numbers[_STEPS] + numbers[_BEHIND] + 1, numbers[_BLOCK_SIZE] == 0
        turns = np.empty(lengths.sum(), np.int64)
        turns[np.repeat(~single, lengths)] = arrays[1]
        first = _begins(lengths)[single]
        turns[first], turns[first + 1] = numbers[_AT["plan_ns"], single], numbers[_TAKEN, single]
        self._held.append(Records(arrays[0], turns, *arrays[2:]))
        self.pending += int(numbers[_STEPS].sum())
        self._begun = np.concatenate((self._begun, np.zeros(len(single), np.int64)))

    def give(self, before_ns: int, whole: int, rest: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Give rows of steps taken in before `before_ns`, a multiple of `whole`; return the needed part of `rest`."""
        held = Records(*(np.concatenate([getattr(part, f.name) for part in self._held]) for f in fields(Records)))
        numbers = held.numbers = np.reshape(held.numbers, (-1, RECORD)).T.copy()
        counts = numbers[_STEPS] - self._begun
        replicas = np.argsort(numbers[0], kind="stable")
        record = np.repeat(replicas, counts[replicas])
        ends = np.cumsum(counts[replicas])
        step = np.arange(len(record)) - np.repeat(ends - counts[replicas] - self._begun[replicas], counts[replicas])
        turn = _begins(numbers[_STEPS] + numbers[_BEHIND] + 1) + 1 + numbers[_BEHIND]
        taken_ns = np.asarray(held.turns)[turn[record] + step]
        order = np.argsort(taken_ns, kind="stable")  # fast: each replica's are sorted
        due = int(np.searchsorted(taken_ns, before_ns, sorter=order)) // whole * whole
        record, step = record[order[:due]], step[order[:due]]
        for begin in range(0, due, self._block):
            part = slice(begin, begin + self._block)
            self._add(self._columns(held, record[part], step[part], rest))
        self._begun += np.bincount(record, minlength=len(self._begun))
        self.pending -= due
        return self._keep(held, rest)

    def _columns(self, held: Records, record: Numbers, step: Numbers, rest: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Return the columns of a step of each `record`, `step` steps after its first."""
        numbers = np.asarray(held.numbers)
        turns = np.asarray(held.turns)
        columns: dict[str, Any] = {name: numbers[_AT[name]].astype(kind).take(record) for name, kind in _AS_IS.items()}
        columns["step"] += step
        rows = columns["decode_rows"]
        columns["decode_context"] += rows * step

        sizes = numbers[_BLOCK_SIZE]
        crossed = np.concatenate(([0, 0], np.cumsum(held.crossings)))
        first = np.where(sizes > 0, _begins(sizes) + 1, 0)
        rounds, ticks = np.divmod(step + 1, np.where(sizes > 0, sizes, _NO_BLOCKS).take(record))
        ticks += first.take(record)
        columns["used_blocks"] += rounds * rows + crossed.take(ticks) - crossed[first].take(record)

        behind = numbers[_BEHIND]
        begins = _begins(numbers[_STEPS] + behind + 1)
        turn = begins.take(record) + step
        plan_ns, taken_ns = turns.take(turn), turns.take((begins + 1 + behind).take(record) + step)
        columns["plan_ns"] = plan_ns
        columns["start_ns"] = plan_ns + (numbers[_AT["start_ns"]] - numbers[_AT["plan_ns"]]).take(record)
        columns["end_ns"] = taken_ns - (numbers[_TAKEN] - numbers[_AT["end_ns"]]).take(record)
        if behind.any():
            at = np.flatnonzero(behind[record])
            columns["start_ns"][at] = turns[turn[at] + 1]
        if len(held.ends):
            at = np.flatnonzero(numbers[_TOLD][record])
            ends = _begins(numbers[_STEPS] * numbers[_TOLD])[record[at]] + step[at]
            columns["end_ns"][at] = np.asarray(held.ends)[ends]

        if self._listed:
            ids, preempted = numbers[_LISTED], numbers[_AT["preempted"]]
            columns["row_ids"], columns["row_tokens"] = _lists(ids, record, held.ids, np.asarray(held.tokens, np.int32))
            (columns["preempted_ids"],) = _lists(preempted, record, held.preempted)
            (columns["stopped_ids"],) = _lists(np.zeros_like(ids), record, held.ids)
        place = numbers[_REST].take(record)
        if place.any():  # else the other columns are null
            kept = zip(*(rest[at] for at in place.tolist()), strict=True)
            columns |= zip(COLUMNS[NUMBERS + LISTS :], kept, strict=True)
        return columns

    def _keep(self, held: Records, rest: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Drop the records whose rows were all given; return the needed part of `rest`."""
        numbers = np.asarray(held.numbers)
        keep = self._begun < numbers[_STEPS]
        steps, behind, listed = numbers[_STEPS], numbers[_BEHIND], numbers[_LISTED] * self._listed
        lengths = {
            "turns": steps + behind + 1,
            "ends": steps * numbers[_TOLD],
            "crossings": numbers[_BLOCK_SIZE],
            "ids": listed,
            "tokens": listed,
            "preempted": numbers[_AT["preempted"]] * self._listed,
        }
        left = {name: np.asarray(getattr(held, name))[np.repeat(keep, counts)] for name, counts in lengths.items()}
        numbers, self._begun = numbers[:, keep], self._begun[keep]
        used, numbers[_REST] = np.unique(numbers[_REST], return_inverse=True)
        if len(used) and used[0]:  # place 0 stays that of the empty rest
            numbers[_REST] += 1
        self._held = [Records(numbers.T.ravel(), **left)]
        return [rest[0], *(rest[at] for at in used.tolist() if at)]


def _begins(lengths: Numbers) -> Numbers:
    """Return the begin of each of several pieces of these lengths, one behind the other."""
    return np.cumsum(lengths) - lengths


def _lists(lengths: Numbers, record: Numbers, *values: Sequence[int] | Numbers) -> list[pa.ListArray]:
    """Return the piece of each `record` in each of `values`, which are pieces of these lengths."""
    counts = lengths.take(record)
    ends = np.cumsum(counts)
    places = np.repeat(_begins(lengths).take(record) - ends + counts, counts)
    places += np.arange(len(places))
    offsets = pa.array(np.append(0, ends).astype(np.int32))
    return [pa.ListArray.from_arrays(offsets, pa.array(np.asarray(each)[places])) for each in values]
