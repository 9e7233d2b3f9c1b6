"""The plan of one engine step.

Rows outside the decode set are listed; the plan refers to the decode set and copies only its aggregates. The engine
reads `rows()` to build tensors before the next plan is made. The simulator reads only the aggregates, from which a cost
model computes the step's time.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.request import Request
from tokentwin.serving.workload import Item


class Row(NamedTuple):
    """One request of a step. The step computes `tokens` tokens after the `start` tokens computed before.

    `samples` is True if the step samples for the request, or gives a pooling request its result. The last `drafts`
    tokens are draft tokens that it verifies.
    """

    request: Request
    start: int
    tokens: int
    samples: bool
    drafts: int = 0


class Padding(NamedTuple):
    """`rows` rows without a request. Each has `tokens` tokens after `start`; its last `drafts` tokens are drafts.

    They are computed and then dropped, because all rows of the batch must have one shape.
    """

    rows: int
    start: int
    tokens: int
    drafts: int = 0


class Aggregate(NamedTuple):
    """A sum over the rows of a step: its unit (empty for a count), its definition, and whether it may need 64 bits."""

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
"""The sizes of a step: fields of `StepPlan`, columns of the dataset `steps`, and the inputs of a cost model.

In a recording, `draft_tokens` is null where it is 0. Other fields of a plan are not recorded.
"""

aggregates_of = attrgetter(*AGGREGATES)
"""The AGGREGATES of a plan, or of anything else that has them, in order."""


class StepAmounts(NamedTuple):
    """The amounts of a `StepPlan` by which steps are priced, without its requests, and read-only.

    A user's cost model gets them in place of the plan. Steps with equal amounts take equally long.
    """

    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    prefill_pairs: int = 0
    decode_rows: int = 0
    decode_context: int = 0
    decode_squares: int = 0
    sampled_rows: int = 0
    draft_tokens: int = 0
    draft_pairs: int = 0
    masked_rows: int = 0
    changed_rows: int = 0
    scored_tokens: int = 0
    routed_tokens: int = -1

    @property
    def tokens(self) -> int:
        """The number of tokens computed in the step."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens

    @property
    def pairs(self) -> int:
        """The number of query-key pairs of causal attention in the step."""
        return self.prefill_pairs + self.decode_context + self.decode_rows + self.draft_pairs


amounts_of = attrgetter(*StepAmounts._fields)
"""The values of the `StepAmounts` of a plan, in order."""

_NOBODY = DecodeSet(1)
_NO_ADAPTERS: dict[str, int] = {}
_NO_ITEMS: dict[int, list[int]] = {}


class StepPlan:
    """One planned step, with its AGGREGATES.

    A row with one token counts as a decode row, even if it ends a prompt, because it costs as much. Draft tokens are
    counted separately: a row of one token and its drafts is a decode row, which reads its KV once.

    Attributes:
        seq: number of the plan, from 0
        lag: number of steps in flight when it was planned
        listed: rows outside the decode set
        departed: rows of requests that have left the decode set since the plan was made
        preempted: requests preempted while planning, in order
        admitted: requests admitted by this plan, for the first time or again
        decode_squares: sum over rows of one token of the square of the tokens computed before
        draft_pairs: number of query-key pairs that the draft tokens add
        masked_rows: number of rows of logits masked for structured answers: for the next token and after each draft
        changed_rows: number of rows of logits that penalties, a bias or other rules change
        scored_tokens: number of prompt tokens whose logits are computed for log-probabilities of the prompt
        padding: rows without a request, which the aggregates count
        routed_tokens: for a data-parallel rank, the step's mean number of tokens over the ranks that share its experts;
            -1 if that is the number of its own tokens
        accepted_tokens: number of accepted draft tokens, set when the step is committed
        verified: (tokens, accepted tokens) of each draft, set when the step is committed
        adapters: number of tokens by LoRA adapter; empty if no request in the step has one
        encoded: by request id, the indices of its items that the step encodes; empty if it encodes none
    """

    __slots__ = (
        *AGGREGATES, "accepted_tokens", "adapters", "admitted", "changed_rows", "clock", "decode_squares", "decodes",
        "departed", "draft_pairs", "encoded",
        "lag", "listed", "masked_rows", "padding", "preempted", "routed_tokens", "scored_tokens", "seq", "verified",
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
        self.changed_rows = self.scored_tokens = 0
        self.routed_tokens = -1
        self.verified: tuple[tuple[int, int], ...] = ()
        self.padding: tuple[Padding, ...] = ()
        self.adapters = _NO_ADAPTERS
        self.encoded = _NO_ITEMS

    @property
    def tokens(self) -> int:
        """The number of tokens computed in the step; 0 means that there is nothing to run."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens

    @property
    def pairs(self) -> int:
        """The number of query-key pairs of causal attention in the step."""
        return self.prefill_pairs + self.decode_context + self.decode_rows + self.draft_pairs

    @classmethod
    def from_amounts(cls, **amounts: int) -> StepPlan:
        """Return a plan without requests that has these aggregates, which are all that a cost model reads."""
        plan = cls(0, _NOBODY, 0)
        for name, amount in amounts.items():
            setattr(plan, name, amount)
        return plan

    def add(self, row: Row) -> None:
        self.listed.append(row)
        self._count(row, 1)

    def pad(self, padding: Padding) -> None:
        """Add `padding`: the aggregates count it and the device computes it, but `rows` does not return it."""
        self.padding += (padding,)
        self._amount(padding.rows, padding.start, padding.tokens, padding.drafts)

    def withdraw(self, request: Request) -> Row | None:
        """Remove the row of `request` and return it; None if there is no such row."""
        for index, row in enumerate(self.listed):
            if row.request is request:
                del self.listed[index]
                self._count(row, -1)
                return row
        return None

    def add_decodes(self, rows: int, context: int, squares: int) -> None:
        """Add `rows` members of the decode set.

        Before this step, `context` is the sum of their computed tokens, and `squares` the sum of the squares.
        """
        self.decode_rows += rows
        self.decode_context += context
        self.decode_squares += squares
        self.sampled_rows += rows

    def count_adapters(self) -> dict[str, int]:
        """Return the number of tokens by LoRA adapter, while the plan is being made."""
        counts = dict(self.decodes.adapters)
        for row in self.rows_outside_decodes():
            if adapter := row.request.arrived.adapter:
                counts[adapter] = counts.get(adapter, 0) + row.tokens
        return counts

    def encode(self, request: Request, items: list[int]) -> None:
        """Encode these items of `request` in the step."""
        self.encoded = {**self.encoded, request.id: items}

    def not_encoded(self, request: Request) -> list[int]:
        """Encode no item of `request` in the step; return the items that it would have encoded."""
        items = self.encoded.get(request.id, [])
        if items:
            self.encoded = {id: others for id, others in self.encoded.items() if id != request.id}
        return items

    def encoded_items(self) -> list[Item]:
        """Return the items that the step encodes."""
        return [row.request.arrived.items[k] for row in self.listed for k in self.encoded.get(row.request.id, ())]

    def skip(self, steps: int) -> None:
        """Turn this plan into the plan of the same members `steps` steps later."""
        self.seq += steps
        self.clock += steps
        self.decode_squares += steps * (2 * self.decode_context + steps * self.decode_rows)
        self.decode_context += steps * self.decode_rows

    def add_departed(self, request: Request) -> None:
        """List the row of `request`, which has just left the decode set, in `departed`."""
        start = request.computed - (self.decodes.clock - self.clock) - 1
        self.departed += (Row(request, start, 1, True),)

    def list_departed(self) -> None:
        """Move the rows in `departed` to `listed`, which is then in order of admission."""
        if self.departed:
            self.listed, self.departed = sorted(self.rows_outside_decodes(), key=_admission), ()

    def _count(self, row: Row, sign: int) -> None:
        request, start, tokens, samples, drafts = row
        if samples and not request.pools:
            self.sampled_rows += sign
            if request.arrived.structured:
                self.masked_rows += sign * (1 + drafts)
            if request.arrived.changes_logits:
                self.changed_rows += sign * (1 + drafts)
        if request.arrived.scores_prompt:  # the last token's logits are those of the first output token
            self.scored_tokens += sign * max(min(start + tokens, request.prompt_len - 1) - start, 0)
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
        """Return every row of a request that is not, or no longer, in the decode set."""
        return [*self.listed, *self.departed] if self.departed else self.listed

    def sampled_for_nobody(self) -> int:
        """Return how many rows sample for requests that an abort or accepted drafts have ended since planning."""
        return sum(row.samples and row.request.ended and not row.request.pools for row in self.rows_outside_decodes())

    def rows(self) -> list[Row]:
        """Return every row, in order of admission. Valid only until the next plan is made or this plan is committed."""
        decodes = [Row(request, request.computed - 1, 1, True) for request in self._steady()]
        return sorted(self.rows_outside_decodes() + decodes, key=_admission)

    def ids_and_tokens(self) -> tuple[list[int], list[int]]:
        """Return the request id and the number of tokens of each of `rows()`, as two lists."""
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
        """Return the members of the decode set that have a row in this plan, in the order in which they joined."""
        return [m for m in self.decodes.members.values() if m.joined < self.clock]


def _admission(row: Row) -> int:
    return row.request.admitted


by_admission = attrgetter("admitted")
