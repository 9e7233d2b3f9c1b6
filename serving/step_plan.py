"""What one engine step does.

Rows that are not in steady decode are listed; the decode set is held *by reference* with its running aggregates. The
engine enumerates `rows()` to build tensors, before the next plan is made; the simulator reads only the
aggregates, which are what a cost model takes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from serving.decode_set import DecodeSet
from serving.request import Request


class Row(NamedTuple):
    """One request of a step: `tokens` of it after the `start` computed before, and whether it samples.

    The last `drafts` of its tokens are draft tokens that the step verifies.
    """

    request: Request
    start: int
    tokens: int
    samples: bool
    drafts: int = 0


class StepPlan:
    """One planned step.

    A row with one token counts as decode whatever it belongs to, since that is what its cost depends on. Draft tokens
    are counted apart: a row of one token and its drafts is a decode row, which reads its KV once.

    seq              number of the plan, from 0
    lag              steps in flight when it was planned
    listed           rows outside the decode set
    strays           rows of requests that have left the decode set since
    preempted        requests preempted while planning, in order
    admitted         requests admitted, first or again
    prefill_rows, prefill_tokens, prefill_context, prefill_pairs    rows of several tokens: count, sum of n,
                     sum of c, and sum of n * (2c + n + 1) / 2 query-key pairs
    decode_rows, decode_context, decode_squares    rows of one token: count, sum of c (pairs: context + rows), and of
                     c squared
    sampled_rows     rows that get an output token
    draft_tokens, draft_pairs    draft tokens to verify, and the query-key pairs they add
    accepted_tokens  of those, the accepted ones, once the step is committed
    """

    __slots__ = (
        "accepted_tokens",
        "admitted",
        "clock",
        "decode_context",
        "decode_rows",
        "decode_squares",
        "decodes",
        "draft_pairs",
        "draft_tokens",
        "lag",
        "listed",
        "preempted",
        "prefill_context",
        "prefill_pairs",
        "prefill_rows",
        "prefill_tokens",
        "sampled_rows",
        "seq",
        "strays",
    )

    def __init__(self, seq: int, decodes: DecodeSet, lag: int) -> None:
        self.seq = seq
        self.decodes = decodes
        self.lag = lag
        self.clock = 0  # the decode set's, after this plan
        self.listed: list[Row] = []
        self.strays: list[Row] = []
        self.preempted: list[Request] = []
        self.admitted: list[Request] = []
        self.prefill_rows = self.prefill_tokens = self.prefill_context = self.prefill_pairs = 0
        self.decode_rows = self.decode_context = self.decode_squares = self.sampled_rows = 0
        self.draft_tokens = self.draft_pairs = self.accepted_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens computed in the step; 0 means that there is nothing to run."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention in the step."""
        return self.prefill_pairs + self.decode_context + self.decode_rows + self.draft_pairs

    def add(self, row: Row) -> None:
        self.listed.append(row)
        self._count(row, 1)

    def withdraw(self, request: Request) -> Row | None:
        """Take the row of `request` out again, if it has one."""
        for index, row in enumerate(self.listed):
            if row.request is request:
                del self.listed[index]
                self._count(row, -1)
                return row
        return None

    def add_decodes(self, rows: int, context: int, squares: int) -> None:
        """`rows` members of the decode set, whose computed tokens and their squares sum to these before this step."""
        self.decode_rows += rows
        self.decode_context += context
        self.decode_squares += squares
        self.sampled_rows += rows

    def skip(self, steps: int) -> None:
        """Become the plan of the same members `steps` steps later."""
        self.seq += steps
        self.clock += steps
        self.decode_squares += steps * (2 * self.decode_context + steps * self.decode_rows)
        self.decode_context += steps * self.decode_rows

    def name(self, request: Request) -> None:
        """`request`, which had its row in the decode set, has left that now."""
        start = request.computed - (self.decodes.clock - self.clock) - 1
        self.strays.append(Row(request, start, 1, True))

    def _count(self, row: Row, sign: int) -> None:
        _, start, tokens, samples, drafts = row
        self.sampled_rows += sign * samples
        if drafts:
            tokens -= drafts
            self.draft_tokens += sign * drafts
            self.draft_pairs += sign * (drafts * (2 * (start + tokens) + drafts + 1) // 2)
        if tokens == 1:
            self.decode_rows += sign
            self.decode_context += sign * start
            self.decode_squares += sign * start * start
        else:
            self.prefill_rows += sign
            self.prefill_tokens += sign * tokens
            self.prefill_context += sign * start
            self.prefill_pairs += sign * (tokens * (2 * start + tokens + 1) // 2)

    def named_rows(self) -> list[Row]:
        """Every row that the decode set does not hold by now."""
        return self.listed + self.strays if self.strays else self.listed

    def rows(self) -> list[Row]:
        """Every row, in running order. Only valid until the next plan is made or this one committed."""
        steady = [m for m in self.decodes.members.values() if m.joined < self.clock]
        decodes = [Row(request, request.computed - 1, 1, True) for request in steady]
        return sorted(self.named_rows() + decodes, key=_admission)


def _admission(row: Row) -> int:
    return row.request.admitted


by_admission = attrgetter("admitted")
