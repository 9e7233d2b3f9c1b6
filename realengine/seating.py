"""Seats for running requests, and the blocks that waiting requests need; the engine updates both with each plan.

Each running request has a seat. On the device, a seat stores the last token sampled for its request, so that the next
step can be launched before the host has seen that token. On the host, a seat has the request's block table, which grows
with the request instead of being rebuilt for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step_input import Ints, PlainRows, RowInput
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row, StepPlan


class Seating:
    """The seats 0 to `max_num_seqs - 1`; the seat `max_num_seqs` is for rows without a request.

    `tables` returns the block tables of a request.
    """

    def __init__(self, config: SchedulerConfig, tables: Callable[[Request], Sequence[Sequence[int]]]) -> None:
        self._block_size = config.block_size
        self._null_seat = config.max_num_seqs
        self._drafts = config.speculative is not None
        self._block_tables = tables
        shape = (max(len(config.kv_groups), 1), config.max_num_seqs, -(-config.max_model_len // config.block_size))
        self._tables = np.zeros(shape, dtype=np.int32)
        self._filled = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._entered: list[list[int]] = [[]] * config.max_num_seqs  # by seat, the list whose blocks its table has
        self._heat, self._top_p = (np.full(config.max_num_seqs, np.nan, dtype=np.float32) for _ in range(2))
        self._top_k = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._free = list(range(config.max_num_seqs))[::-1]
        self._seats: dict[int, int] = {}
        self._left: dict[int, Ints] = {}  # by request id, block tables of requests that the last plan preempted

    def follow(self, plan: StepPlan) -> None:
        """Give seats to the requests that `plan` admits, and free the seats of those that it preempts.

        `blocks` still returns the blocks of preempted requests until the next plan.
        """
        self._left.clear()
        for request in plan.preempted:
            if (seat := self._seats.get(request.id)) is not None:
                self._left[request.id] = self._tables[:, seat].copy()
            self.leave(request.id)
        for request in plan.admitted:
            seat = self._seats[request.id] = self._free.pop()
            self._filled[seat] = 0
            self._heat[seat] = np.nan  # not known yet

    def leave(self, id: int) -> None:
        """Free the seat of a request that is no longer running.

        A step in flight may still write to the seat; the next request in the seat writes to it later.
        """
        seat = self._seats.pop(id, None)
        if seat is not None:
            self._free.append(seat)

    def blocks(self, request: Request, tokens: int) -> Ints:
        """Return a request's block ids `[groups, blocks]`, which cover at least its first `tokens` tokens."""
        seat = self._seats.get(request.id)
        if seat is None:
            return self._left[request.id]
        if request.blocks is not self._entered[seat]:  # the pool replaced blocks, or the seat has a new request
            self._entered[seat], self._filled[seat] = request.blocks, 0
        need, filled = -(-tokens // self._block_size), int(self._filled[seat])
        # enter new blocks only: earlier entries stay, even if their blocks have left a window, because these are not
        # read
        if filled < need:
            for table, blocks in zip(self._tables, self._block_tables(request), strict=True):
                table[seat, filled:need] = blocks[filled:need]
            self._filled[seat] = need
        return self._tables[:, seat]

    def row(self, row: Row, sequence: TokenSequence | None, masks: tuple[Ints, ...] = ()) -> RowInput:
        """Return the input for one row of a plan; `masks` are those of the tokens that it samples.

        With speculative decoding, a row was planned as if all drafts of the step before would be accepted; it now
        begins no later than the last known token. A row whose request was aborted since then computes the same number
        of tokens in the null block.
        """
        request, start, count, samples, drafts = row
        seat = self._seats.get(request.id)
        if seat is None or sequence is None:
            return self._null_row(start, count)
        if self._drafts:
            start = min(start, len(sequence.tokens) - 1)
        first = start + count - drafts - sequence.prompt_len  # index of the output token that is sampled first
        draws: tuple[tuple[float, int, float, float] | None, ...] = ()
        if samples:
            draws = (None,) if request.pools else tuple(map(sequence.sampling.draw, range(first, first + 1 + drafts)))
        wanted = sequence.logprobs if samples else None
        tokens = sequence.inputs(start, count, seat, drafts)
        changes = sequence.changes(drafts, unseen=tokens[-1] < 0) if samples else ()
        blocks, *others = self.blocks(request, start + count)
        pools = samples and request.pools
        given = RowInput(tokens, start, blocks, seat, draws, wanted, masks, changes, tuple(others), pools)
        if sequence.score_top is None:
            return given
        scored = tuple(sequence.tokens[start + 1 : min(start + count + 1, sequence.prompt_len)])
        return given._replace(scored=scored, score_top=sequence.score_top)

    def plain(
        self, rows: Sequence[Row], sequences: Sequence[TokenSequence | None]
    ) -> tuple[PlainRows | None, list[int]]:
        """Return the plain rows of a plan, None if there are none, and the indices of all other rows."""
        if self._drafts:
            return None, list(range(len(rows)))
        numbers: list[int] = []
        others: list[int] = []
        tokens: list[int] = []
        starts: list[int] = []
        seats: list[int] = []
        uniforms: list[float] = []
        seat_of, entered = self._seats.get, self._entered
        for number, ((request, start, count, samples, _), sequence) in enumerate(zip(rows, sequences, strict=True)):
            seat = seat_of(request.id)
            if seat is None or sequence is None or not sequence.is_plain or sequence.grammar is not None:
                others.append(number)
                continue
            if count != 1 or not samples:
                others.append(number)
                continue
            if request.blocks is not entered[seat]:
                self.blocks(request, start + 1)
            numbers.append(number)
            seats.append(seat)
            starts.append(start)
            tokens.append(sequence.inputs(start, 1, seat, 0)[0])
            uniforms.append(sequence.uniform(start + 1 - sequence.prompt_len))
        if not numbers:
            return None, others
        seated, begins = np.array(seats, dtype=np.int32), np.array(starts, dtype=np.int32)
        for place in np.flatnonzero(np.isnan(self._heat[seated])).tolist():
            self._note_limits(seats[place], sequences[numbers[place]])
        needs = begins // self._block_size + 1
        for place in np.flatnonzero(self._filled[seated] < needs).tolist():
            self.blocks(rows[numbers[place]].request, starts[place] + 1)
        row_of = np.repeat(seated, needs)
        within = np.arange(len(row_of), dtype=np.int32) - np.repeat(np.cumsum(needs, dtype=np.int32) - needs, needs)
        blocks = tuple(table[row_of, within] for table in self._tables)
        heat = self._heat[seated]
        floats = {"temperature": heat, "top_p": self._top_p[seated], "uniform": np.array(uniforms, dtype=np.float32)}
        draws = {"top_k": self._top_k[seated], **{name: column.view(np.int32) for name, column in floats.items()}}
        return PlainRows(numbers, tokens, begins, seated, draws, not heat.any(), needs, blocks), others

    def _note_limits(self, seat: int, sequence: TokenSequence | None) -> None:
        """Keep a request's settings of draws at its seat, as they are packed: those of a greedy request are neutral."""
        assert sequence is not None
        how = SamplingParams() if sequence.greedy else sequence.sampling
        self._heat[seat], self._top_k[seat], self._top_p[seat] = how.temperature, how.top_k, how.top_p

    def padding(self, plan: StepPlan) -> list[RowInput]:
        """Return the rows of a plan that belong to no request."""
        return [self._null_row(row.start, row.tokens) for row in plan.padding for _ in range(row.rows)]

    def _null_row(self, start: int, count: int) -> RowInput:
        null = np.zeros(-(-(start + count) // self._block_size), dtype=np.int32)
        return RowInput([0] * count, start, null, self._null_seat, (), other_blocks=(null,) * (len(self._tables) - 1))


class WaitingDemand:
    """The number of KV blocks (`blocks`) that the known tokens of all waiting requests would need."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._demands: dict[int, int] = {}
        self.blocks = 0

    def wait(self, request: Request) -> None:
        """Count a request that now waits, or count it again because it has a new token while it waits."""
        self.leave(request.id)
        need = self._demands[request.id] = most_held(self._config, request.known)
        self.blocks += need

    def leave(self, id: int) -> None:
        """Stop counting a request, if it was counted."""
        self.blocks -= self._demands.pop(id, 0)

    def follow(self, plan: StepPlan) -> None:
        """Count preempted requests, and stop counting admitted ones."""
        for request in plan.preempted:
            self.wait(request)
        for request in plan.admitted:
            self.leave(request.id)

    def returned(self, request: Request) -> None:
        """Note that a request got a token; a preempted request may still get one from an earlier step."""
        if request.id in self._demands:
            self.wait(request)
