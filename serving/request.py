"""The live state of one request inside a scheduler.

These invariants hold, and `check` tests them: `cached <= computed <= known + placeholders` and `known <= true_len <=
max_len`. A request has no phases. It wants `known + placeholders - computed` tokens, and this one number covers
prefill, chunked prefill, resumption and decode, as in vLLM V1.

While a request is a member of a `DecodeSet`, its counts advance with the set's clock, so that a step takes O(1) time.
The properties here add the ticks of that clock since the request joined.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tokentwin.serving.kv.block_runs import BlockTable
from tokentwin.serving.workload import Span, WorkloadRequest

if TYPE_CHECKING:
    from tokentwin.serving.decode_set import DecodeSet


class Status(Enum):
    """The state of a request."""

    WAITING = "waiting"
    LOADING = "loading"  # waits for KV from outside the engine, and holds blocks for it
    RUNNING = "running"
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


_LIVE = (Status.WAITING, Status.LOADING, Status.RUNNING)


class Request(BlockTable):
    """The token counts of one request, and its block table.

    If the KV cache has several groups, this is the block table of the first group with full attention.

    arrived       the request as its server knows it
    truth         the request as the workload has it, with its true output length, which no server knows
    max_len       prompt tokens plus the maximum number of output tokens: the length that policies may know
    true_len      prompt tokens plus the output tokens that it will have when it ends, which no server knows
    computed      tokens whose KV exists or is scheduled to be computed
    known         prompt tokens plus sampled tokens that have returned
    placeholders  tokens that are scheduled to be sampled and have not returned; all drafts count as accepted
    in_flight     tokens of steps that have not returned
    stale         tokens in flight that were scheduled before a preemption
    cached        tokens found in the prefix cache, or loaded, at the last admission
    pools         True for a pooling request: its result takes the place of a sampled token, and is not known as one
    proposed      number of draft tokens that its next step can verify
    accepted_last number of drafts that its last step accepted; -1 while none of its drafts was ever accepted
    decoding      True if its last step sampled for it; at its admission, True if only the next token is missing
    compiling     True while its grammar is being compiled, or embeddings are sent to it; it cannot run before
    passed_over   True if requests behind it were considered for admission because it could not run yet
    eligible      number of the first plan that may contain its next decode; only used with a decode stagger
    """

    __slots__ = (
        "_computed", "_in_flight", "_known", "_placeholders", "accepted_last", "accepted_tokens", "admitted", "arrived",
        "block_count", "cached", "compiling", "decodes", "decoding", "draft_tokens", "drafts", "eligible", "first_hit",
        "hashed", "id", "joined", "keys", "loading", "max_len", "passed_over", "pools", "preemptions", "priority",
        "prompt_len", "proposed", "reason", "recomputed", "sampled_in", "spans", "stale", "status", "true_exit_clock",
        "true_len", "truth",
    )  # fmt: skip

    def __init__(self, arrived: WorkloadRequest, outputs: int = 0) -> None:
        super().__init__()
        self.arrived = self.truth = arrived
        self.id = arrived.id
        self.priority = arrived.priority
        self.prompt_len = prompt_len = arrived.prompt_len
        self.max_len = prompt_len + arrived.output_limit
        self.true_len = prompt_len + arrived.output_len
        self.pools = arrived.output_len == 0
        self.status = Status.WAITING
        self.reason = ""
        self._computed = 0
        self._known = prompt_len + outputs
        self._placeholders = 0
        self._in_flight = 0
        self.stale = 0
        self.cached = 0
        self.proposed = 0
        self.decoding = False
        self.compiling = self.passed_over = False
        self.eligible = 0
        self.decodes: DecodeSet | None = None
        self.joined = 0  # the set's clock when this request joined it
        self.true_exit_clock = 0  # the set's clock when its last token will be scheduled
        self.admitted = -1  # place in the order of rows in a step: of its admission, or of a later change by the policy
        self.block_count = 0  # number of blocks that it references
        self.hashed = 0  # number of full blocks among them that other requests can reuse
        self.spans: list[Span] = []  # parts of its sequence, made on demand
        self.keys: list[bytes] = []  # content keys of its leading blocks, computed on demand
        self.loading = 0  # tokens that will be computed when the present load has ended
        self.first_hit: int | None = None  # prefix-cache hit at first admission, tokens
        self.preemptions = 0
        self.recomputed = 0  # tokens computed again after preemptions
        self.drafts = 0  # number of steps that verified draft tokens of this request
        self.draft_tokens = 0  # number of draft tokens that steps verified
        self.accepted_tokens = 0
        self.accepted_last = -1
        # (first step, number of steps) of each run of steps that sampled for it
        self.sampled_in: list[tuple[int, int]] = []

    @property
    def computed(self) -> int:
        if self.decodes is None:
            return self._computed
        return self._computed + self.decodes.clock - self.joined

    @property
    def known(self) -> int:
        if self.decodes is None:
            return self._known
        returned = self.decodes.committed - self.joined
        return self._known + returned if returned > 0 else self._known

    @property
    def placeholders(self) -> int:
        if self.decodes is None:
            return self._placeholders
        return self._placeholders + self._decodes_in_flight

    @property
    def in_flight(self) -> int:
        return self._in_flight + self._decodes_in_flight

    @property
    def _decodes_in_flight(self) -> int:
        if self.decodes is None:
            return 0
        return self.decodes.clock - max(self.decodes.committed, self.joined)

    @property
    def pending(self) -> int:
        """The number of tokens to compute before the next token is sampled: 1 while the request decodes."""
        return self._known + self._placeholders - self._computed if self.decodes is None else 1

    def hide(self, truth: WorkloadRequest) -> None:
        """End this request, which was made from what a server knows, where `truth` ends."""
        self.truth = truth
        self.true_len = min(self.prompt_len + truth.output_len, self.max_len)

    @property
    def unscheduled(self) -> int:
        """The number of output tokens up to `max_len` that no step is planned for."""
        return self.max_len - self.known - self.placeholders

    @property
    def true_unscheduled(self) -> int:
        """The number of output tokens up to `true_len` without a planned step; negative if steps go beyond it."""
        if self.decodes is None:
            return self.true_len - self._known - self._placeholders
        return self.true_exit_clock - self.decodes.clock

    @property
    def outputs(self) -> int:
        """The number of output tokens that have returned."""
        return self.known - self.prompt_len

    def full_blocks(self, block_size: int) -> int:
        """Return the number of blocks that can be reused: those full of tokens that are computed and known."""
        if self.decodes is None:
            return self.hashed
        return max(self.hashed, (self.computed - self.decodes.lag) // block_size)

    @property
    def ended(self) -> bool:
        return self.status not in _LIVE

    def scheduled(self, tokens: int, drafts: int = 0) -> bool:
        """Count `tokens` more tokens as computed and in flight; return whether the step samples for this request.

        The last `drafts` of the tokens are draft tokens.
        """
        self._computed += tokens
        self._in_flight += tokens
        samples = self._computed >= self._known + self._placeholders
        if samples:
            self._placeholders += 1 + drafts
        return samples

    def returned(self, tokens: int, sampled: bool, drafts: int = 0, accepted: int = 0) -> None:
        """End a step with `tokens` tokens of this request; a stale step only delivers its sampled tokens.

        `accepted` of the `drafts` draft tokens that the step verified become output tokens, up to the request's last
        token. The others count as not computed; their blocks stay.
        """
        accepted = min(accepted, self.true_len - self._known - 1)
        if sampled and not self.pools:
            self._known += 1 + accepted
        if self.stale:
            self.stale -= tokens
            return
        self._in_flight -= tokens
        if drafts:
            self._computed -= drafts - accepted
        if sampled:
            self._placeholders -= 1 + drafts

    def withdraw(self, tokens: int, samples: bool, drafts: int = 0) -> None:
        """Undo `scheduled`, because the request is preempted while its step is still being planned."""
        self._computed -= tokens
        self._in_flight -= tokens
        if samples:
            self._placeholders -= 1 + drafts

    def count_cached(self, tokens: int) -> None:
        """Count the first `tokens` known tokens as computed: they are in the prefix cache, or have been loaded."""
        self.cached = self._computed = tokens

    def await_grammar(self) -> None:
        """Let other requests pass this request until its grammar or its embeddings come and `compiling` is cleared."""
        self.compiling = self.passed_over = True

    def preempted(self) -> None:
        """Lose all computed tokens; tokens in flight become stale."""
        self.stale = self._in_flight
        self._computed = self._placeholders = self._in_flight = self.cached = self.proposed = 0
        self.preemptions += 1
        self.status = Status.WAITING

    def advance(self, scheduled: int, returned: int) -> None:
        """Add the number of steps that a decode set scheduled for this request, `returned` of which have returned."""
        self._computed += scheduled
        self._known += returned
        self._placeholders += scheduled - returned
        self._in_flight += scheduled - returned

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold (tests call this after every step)."""
        assert 0 <= self.cached <= self.computed <= self.known + self.placeholders, self
        assert self.known <= self.true_len <= self.max_len, self
        assert self.hashed <= self.block_count, self

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.status.value}, cached={self.cached}, computed={self.computed}, "
            f"known={self.known}+{self.placeholders}, max_len={self.max_len})"
        )
