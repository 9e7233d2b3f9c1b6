"""What one step of SGLang may still admit: pages, tokens of prompts, and the output that running requests may need.

It follows SGLang's `PrefillAdder`, `PrefillBudget` and `NewTokenRatioTracker`. The needed output of a request is its
limit, of which only a fraction, the *new token ratio*, is reserved while it runs: requests may stop earlier. A request
without `max_tokens` has a stated length, as in benchmarks with `ignore_eos`, so all of it is reserved. The ratio
falls with each decode step, and rises when requests had to be retracted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.radix_pool import RadixPool
from tokentwin.serving.kv.radix_tree import RadixNode
from tokentwin.serving.request import Request

# SGLang's defaults of environment variables
_INIT_RATIO, _MIN_FACTOR, _DECAY_STEPS = 0.7, 0.14, 600  # SGLANG_INIT_NEW_TOKEN_RATIO and its relatives
_RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS
_MOST_OUTPUT = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION


class NewTokenRatio:
    """The fraction `now` of their remaining output that running requests are expected to need."""

    def __init__(self, conservativeness: float) -> None:
        self._first = min(_INIT_RATIO * conservativeness, 1.0)
        self._least = min(self._first * _MIN_FACTOR, 1.0)
        self._step = (self._first - self._least) / _DECAY_STEPS
        self.now = self._first

    def reset(self) -> None:
        self.now = self._first

    def decay(self, steps: int) -> None:
        """Lower the ratio for `steps` decode steps, one by one, so that it is rounded as SGLang rounds it."""
        while steps and self.now > self._least:
            self.now = max(self.now - self._step, self._least)
            steps -= 1

    def estimate(self, requests: Collection[Request]) -> None:
        """Set the ratio after a retraction that left `requests`."""
        outputs = sum(request.outputs for request in requests)
        limits = sum(request.max_len - request.prompt_len for request in requests)
        self.now = min(1.0, (outputs + _RETRACT_STEPS * len(requests)) / (limits + 1))


def output_estimate(request: Request) -> int:
    """Return the number of output tokens that SGLang expects of `request` in all, if it does not stop early."""
    return min(request.max_len - request.prompt_len, _MOST_OUTPUT)


class Verdict(Enum):
    """Whether a step admits more requests."""

    CONTINUE = "continue"
    NO_TOKEN = "pages run out"
    OTHER = "the step has enough tokens"


class Admission:
    """A request that is admitted: its cached prefix ends at `node`, and the step computes `tokens` tokens after it."""

    __slots__ = ("chunked", "node", "tokens")

    def __init__(self, node: RadixNode, tokens: int, chunked: bool) -> None:
        self.node = node
        self.tokens = tokens
        self.chunked = chunked


class PrefillBudget:
    """The budget of one step with prompts, beside `mixed` decodes.

    `running` are the requests that decode, in SGLang's order, because their needs are added up in floating point.

    Attributes:
        matched: number of cached tokens of the request that was last considered
    """

    def __init__(
        self,
        pool: RadixPool,
        config: SchedulerConfig,
        ratio: float,
        running: Iterable[Request],
        mixed: int,
    ) -> None:
        self._pool = pool
        self._page = pool.page
        self._ratio = ratio
        self._running = running
        most = config.max_num_batched_tokens
        self._tokens = min(config.max_prefill_tokens, most) - mixed
        self._chunk = most - mixed if config.enable_chunked_prefill else None
        # SGLang refuses chunks smaller than a page; here they are not whole pages
        self._unit = self._page if most >= self._page else 1
        self._left = most  # limit of the deployment; only whole prompts can reach it
        needed = 0.0
        for request in running:
            needed += self.need(request)
        self._reserved = mixed + needed  # tokens that requests of this step and running requests will take
        self._taken = mixed  # tokens that requests of this step take at once
        self._needs: list[tuple[float, int]] | None = (
            None  # of requests with a stated length; see `_fits_without_cache`
        )
        self._added: list[Request] = []
        self.matched = 0

    def need(self, request: Request) -> float:
        """Return the number of output tokens that are reserved for a running request."""
        part = 1.0 if request.arrived.max_tokens is None else self._ratio
        return min(request.max_len - request.known, _MOST_OUTPUT) * part

    @property
    def room(self) -> float:
        """The number of tokens that are free, or will be, after all reservations."""
        return self._pool.free * self._page - self._reserved

    def preempted(self, request: Request) -> None:
        """Reserve no output for a request that no longer runs."""
        self._reserved -= self.need(request)

    def verdict(self) -> Verdict:
        free = self._pool.free * self._page
        if free - self._reserved <= 0 or free - self._taken <= 0:
            return Verdict.NO_TOKEN
        if self._tokens <= 0 or (self._chunk is not None and self._chunk <= 0):
            return Verdict.OTHER
        return Verdict.CONTINUE

    def go_on(self, request: Request) -> tuple[int, bool]:
        """Return how many tokens of the chunked request the step computes, and whether they are its last."""
        assert self._chunk is not None
        room = min(self._chunk, int(self._pool.free * self._page - self._reserved))
        if room <= 0:
            room = self._chunk
        left = request.known - request.computed
        tokens = min(left, room)
        self._reserve(request, tokens, ends=left <= room)
        return tokens, left <= room

    def admit(self, request: Request, first: bool) -> Admission | Verdict:
        """Admit `request` and lock its cached prefix, or return why it must wait."""
        pool, page = self._pool, self._page
        node = pool.match(request, request.known - 1)
        self.matched = node.end
        left = request.known - node.end
        if request.arrived.max_tokens is None and not pool.caches:
            return self._admit_without_cache(request, node, left)
        pool.tree.lock(node)
        output = min(request.max_len - request.known, _MOST_OUTPUT)
        verdict, tokens, chunked = Verdict.CONTINUE, left, False
        whole = -(-left // page) * page
        if not left + output + page < pool.free * page - self._reserved:
            verdict = Verdict.NO_TOKEN
        elif self._chunk is None:
            if not first and whole >= self._tokens:
                verdict = Verdict.OTHER
        elif whole > self._chunk:
            tokens, chunked = self._chunk // self._unit * self._unit, True
            if tokens <= 0:
                verdict = Verdict.OTHER
        if verdict is not Verdict.CONTINUE:
            pool.tree.unlock(node)
            return verdict
        self._reserve(request, tokens, ends=not chunked)
        return Admission(node, tokens, chunked)

    def _reserve(self, request: Request, tokens: int, ends: bool) -> None:
        whole = -(-tokens // self._page) * self._page
        output = output_estimate(request) if ends else 0
        self._reserved += whole + self._page + output
        self._taken += whole + self._page
        self._tokens -= whole
        self._left -= tokens
        if self._chunk is not None:
            self._chunk -= whole
        self._added.append(request)

    def _admit_without_cache(self, request: Request, node: RadixNode, left: int) -> Admission | Verdict:
        """Admit a request with a stated length if all requests can run to their ends, one after another."""
        free = self._pool.free * self._page
        need = -(-left // self._page) * self._page + self._page
        if need > min(free - self._taken, free - self._reserved):
            return Verdict.NO_TOKEN
        if self._needs is None:
            self._needs = []
            for other in (request, *self._running, *self._added):
                self._note_need(other, in_order=False)
            self._needs.sort(key=lambda pair: pair[0])
        else:
            self._note_need(request, in_order=True)
        room, freed = free - self._taken - need, 0
        for number, (output, tokens) in enumerate(self._needs):
            beside = len(self._needs) - number
            if room + freed - output * beside <= beside:
                return Verdict.NO_TOKEN
            freed += tokens
        chunked = self._chunk is not None and left > self._chunk
        if chunked:
            assert self._chunk is not None
            if self._chunk <= 0:
                return Verdict.OTHER
            left = self._chunk
        elif left > self._left:
            return Verdict.OTHER
        self._reserve(request, left, ends=not chunked)
        return Admission(node, left, chunked)

    def _note_need(self, request: Request, in_order: bool) -> None:
        """Note how many output tokens `request` will still need, and how many tokens it frees then."""
        part = 1.0 if request.arrived.max_tokens is None else self._ratio
        output = (request.max_len - request.prompt_len) * part - request.outputs
        if output <= 0:
            return
        assert self._needs is not None
        place = len(self._needs)
        if in_order:  # as SGLang inserts: before the first that needs as much, or else before the last
            as_much = [number for number, (other, _) in enumerate(self._needs) if output <= other]
            place = as_much[0] if as_much else max(place - 1, 0)
        self._needs.insert(place, (output, request.known))
