"""The plan of one engine step.

Rows that are not in steady decode are listed; the decode set is held *by reference* with its running aggregates. The
engine enumerates `rows()` to build tensors, before the next plan is made; the simulator reads only the aggregates, from
which a cost model prices the step.
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


class Padding(NamedTuple):
    """A number of `rows` without a request, each of `tokens` tokens after `start`, the last `drafts` of them drafts.

    They are computed for nothing, because a batch has one shape.
    """

    rows: int
    start: int
    tokens: int
    drafts: int = 0


class Aggregate(NamedTuple):
    """A sum over the rows of a step: unit (empty for a count), definition, and whether it may need 64 bits."""

    unit: str
    definition: str
    wide: bool = False


AGGREGATES = {
    "prefill_rows": Aggregate("", "requests with more than one token in the step, drafts not counted"),
    "prefill_tokens": Aggregate("tokens", "tokens of those requests"),
    "prefill_context": Aggregate("tokens", "tokens computed before, summed over those requests", True),
    "prefill_pairs": Aggregate("", "query-key pairs of their causal attention: sum of n*(2c+n+1)/2", True),
    "decode_rows": Aggregate("", "requests with one token in the step, drafts not counted"),
    "decode_context": Aggregate("tokens", "tokens computed before, summed over those requests", True),
    "sampled_rows": Aggregate("", "requests that got output tokens"),
    "draft_tokens": Aggregate("tokens", "draft tokens verified, beside prefill_tokens and decode_rows; null if none"),
}
"""What a step holds: fields of `StepPlan`, columns of the dataset `steps`, and what a cost model is fitted to.

The last is null in a recording where it is 0. What a plan has beside them is not recorded.
"""

aggregates_of = attrgetter(*AGGREGATES)
"""The AGGREGATES of a plan, or of anything else that has them, in order."""


_NOBODY = DecodeSet(1)


class StepPlan:
    """One planned step, with its AGGREGATES.

    A row with one token counts as decode whatever it belongs to, since its cost depends on that. Draft tokens are
    counted apart: a row of one token and its drafts is a decode row, which reads its KV once.

    Attributes:
        seq: number of the plan, from 0
        lag: steps in flight when it was planned
        listed: rows outside the decode set
        departed: rows of requests that have left the decode set since
        preempted: requests preempted while planning, in order
        admitted: requests admitted, first or again
        decode_squares: sum of the squares of the tokens computed before, over rows of one token
        draft_pairs: query-key pairs that the draft tokens add
        masked_rows: rows of logits that are masked for structured answers: for the next token, and after each draft
        padding: rows without a request, which the aggregates count
        routed_tokens: for a data-parallel rank, tokens of the step on average over the ranks that share its experts;
            -1: as many as it has itself
        accepted_tokens: draft tokens that were accepted, once the step is committed
        verified: (tokens, accepted tokens) of each draft, once the step is committed
    """

    __slots__ = (
        *AGGREGATES, "accepted_tokens", "admitted", "clock", "decode_squares", "decodes", "departed", "draft_pairs",
        "lag", "listed", "masked_rows", "padding", "preempted", "routed_tokens", "seq", "verified",
    )  # fmt: skip

    def __init__(self, seq: int, decodes: DecodeSet, lag: int) -> None:
        self.seq = seq
        self.decodes = decodes
        self.lag = lag
        self.clock = 0  # clock of the decode set after this plan
        self.listed: list[Row] = []
        self.departed: tuple[Row, ...] = ()
        self.preempted: tuple[Request, ...] = ()
        self.admitted: tuple[Request, ...] = ()
        self.prefill_rows = self.prefill_tokens = self.prefill_context = self.prefill_pairs = 0
        self.decode_rows = self.decode_context = self.decode_squares = self.sampled_rows = 0
        self.draft_tokens = self.draft_pairs = self.accepted_tokens = self.masked_rows = 0
        self.routed_tokens = -1
        self.verified: tuple[tuple[int, int], ...] = ()
        self.padding: tuple[Padding, ...] = ()

    @property
    def tokens(self) -> int:
        """The tokens computed in the step; 0 means that there is nothing to run."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens

    @property
    def pairs(self) -> int:
        """The query-key pairs of causal attention in the step."""
        return self.prefill_pairs + self.decode_context + self.decode_rows + self.draft_pairs

    @classmethod
    def from_amounts(cls, **amounts: int) -> StepPlan:
        """Return a plan without requests that has these amounts: all that a cost model reads."""
        plan = cls(0, _NOBODY, 0)
        for name, amount in amounts.items():
            setattr(plan, name, amount)
        return plan

    def add(self, row: Row) -> None:
        self.listed.append(row)
        self._count(row, 1)

    def pad(self, padding: Padding) -> None:
        """Compute `padding`, too: the aggregates have it, and a device computes it; `rows` does not return it."""
        self.padding += (padding,)
        self._amount(padding.rows, padding.start, padding.tokens, padding.drafts)

    def withdraw(self, request: Request) -> Row | None:
        """Take the row of `request` out again, if it has one."""
        for index, row in enumerate(self.listed):
            if row.request is request:
                del self.listed[index]
                self._count(row, -1)
                return row
        return None

    def add_decodes(self, rows: int, context: int, squares: int) -> None:
        """Add `rows` members of the decode set.

        Their computed tokens sum to `context`, and the squares of these to `squares`, before this step.
        """
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

    def add_departed(self, request: Request) -> None:
        """List the row of `request`, which was in the decode set and has now left it."""
        start = request.computed - (self.decodes.clock - self.clock) - 1
        self.departed += (Row(request, start, 1, True),)

    def _count(self, row: Row, sign: int) -> None:
        request, start, tokens, samples, drafts = row
        self.sampled_rows += sign * samples
        if samples and request.arrived.structured:
            self.masked_rows += sign * (1 + drafts)
        self._amount(sign, start, tokens, drafts)

    def _amount(self, rows: int, start: int, tokens: int, drafts: int) -> None:
        if drafts:
            tokens -= drafts
            self.draft_tokens += rows * drafts
            self.draft_pairs += rows * (drafts * (2 * (start + tokens) + drafts + 1) // 2)
        if tokens == 1:
            self.decode_rows += rows
            self.decode_context += rows * start
            self.decode_squares += rows * start * start
        else:
            self.prefill_rows += rows
            self.prefill_tokens += rows * tokens
            self.prefill_context += rows * start
            self.prefill_pairs += rows * (tokens * (2 * start + tokens + 1) // 2)

    def rows_outside_decodes(self) -> list[Row]:
        """Return every row that the decode set does not hold by now."""
        return [*self.listed, *self.departed] if self.departed else self.listed

    def sampled_for_nobody(self) -> int:
        """Return how many rows sample for requests that were withdrawn since, or ended by more accepted drafts."""
        return sum(row.samples and row.request.ended for row in self.rows_outside_decodes())

    def rows(self) -> list[Row]:
        """Return every row, in running order. Only valid until the next plan is made or this one committed."""
        decodes = [Row(request, request.computed - 1, 1, True) for request in self._steady()]
        return sorted(self.rows_outside_decodes() + decodes, key=_admission)

    def ids_and_tokens(self) -> tuple[list[int], list[int]]:
        """Return the requests' ids and the tokens of `rows()`."""
        ordered = self._steady()
        ids = self.decodes.ids(ordered)
        tokens = [1] * len(ids)
        for request, _, count, _, _ in self.rows_outside_decodes():
            at = len(ids)
            while at and ordered[at - 1].admitted > request.admitted:
                at -= 1
            ordered.insert(at, request)
            ids.insert(at, request.id)
            tokens.insert(at, count)
        return ids, tokens

    def _steady(self) -> list[Request]:
        """Return members of the decode set that have a row, in the order in which they joined."""
        return [m for m in self.decodes.members.values() if m.joined < self.clock]


def _admission(row: Row) -> int:
    return row.request.admitted


by_admission = attrgetter("admitted")
