"""KV that lies outside an engine's own blocks, in slower memory or another engine, and the requests that wait for it.

A scheduler asks how much KV of a waiting request could be loaded instead of computed. If there is any, the request gets
blocks for it and waits, loading, while others pass it; when the data are there it goes before all requests that hold no
blocks. A load begins only if it leaves enough blocks for the prompts that are under way already. The rules are those of
vLLM's KV connectors, with asynchronous loads. The implementation of `ExternalKv` decides what lies outside, what a
transfer costs, and when it ends.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from serving.deployments.config import SchedulerConfig
from serving.errors import UserError
from serving.kv.blocks import Hit, KvBlocks, blocks_for
from serving.request import Request, Status
from serving.scheduler import Scheduler
from serving.step_plan import StepPlan
from serving.waiting import WaitingQueue
from serving.workload import WorkloadRequest


class ExternalKv(Protocol):
    """The KV outside an engine, as its scheduler uses it."""

    @property
    def synchronous(self) -> bool:
        """True if the step that admits a request loads its KV, instead of a transfer that other requests pass."""
        ...

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens after the first `cached` can be loaded.

        With `cached` they are at most `known` tokens, or `known - 1` if loads are synchronous. The scheduler calls this
        whenever it considers a waiting request, so it must change nothing.
        """
        ...

    def load(self, request: Request, start: int, tokens: int) -> None:
        """Begin to load `tokens` tokens from `start` on; the request has blocks for them, and is loading.

        Answer once, and not before this call returns, by the scheduler's `loaded` or `load_failed`. Answer also if the
        request has been aborted meanwhile, since its blocks are free only then. If loads are synchronous, the request
        runs, and needs no answer.
        """
        ...

    def admitted(self, request: Request) -> None:
        """Record that `request` runs now, with its cached or loaded tokens."""
        ...

    def keeps(self, request: Request) -> bool:
        """Return whether the blocks of `request`, which has its last token, are still needed, until `release`."""
        ...


class ExternalScheduler(Scheduler, Protocol):
    """A policy that can load KV, and keep it for another engine."""

    def connect(self, external: ExternalKv) -> None:
        """Ask `external` from now on."""
        ...

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        """Queue a request whose first `outputs` tokens another engine has sampled."""
        ...

    def loaded(self, request: Request) -> None:
        """Let the request run: the KV that `ExternalKv.load` loads is there."""
        ...

    def load_failed(self, request: Request) -> None:
        """Let the request wait again, without KV: the load has failed."""
        ...

    def release(self, request: Request) -> None:
        """Free the blocks that `ExternalKv.keeps` kept."""
        ...


def connect(scheduler: Scheduler, external: ExternalKv) -> None:
    """Make `scheduler` use `external`. Raises UserError if its policy cannot."""
    calls = ("connect", "loaded", "load_failed", "release")
    if not all(hasattr(scheduler, call) for call in calls):
        remedy = f"cannot load KV from outside, which takes {', '.join(calls)}; derive it from VllmScheduler"
        raise UserError("policy", type(scheduler).__name__, remedy)
    scheduler.connect(external)  # type: ignore[attr-defined]


class KvLoading:
    """The loads of one scheduler.

    Attributes:
        holding: waiting requests that hold KV blocks, or did until their load failed, in order of admission
        step_blocks: blocks that the drafts of a step take
        leaving: requests that have ended, whose blocks a step in flight may still write to, and its number
    """

    def __init__(self, external: ExternalKv, pool: KvBlocks, config: SchedulerConfig, holding: WaitingQueue) -> None:
        self.external = external
        self.holding = holding
        self.leaving: deque[tuple[int, Request]] = deque()
        self._prefills: dict[int, Request] = {}  # with reserved blocks: `holding`, and running with a part computed
        self._pool = pool
        self._block_size = config.block_size
        self._state_blocks = config.state_blocks
        self._drafting = 0  # tokens beyond the known ones that a decode step takes blocks for
        if (drafts := config.speculative) is not None:
            self._drafting = 1 + drafts.num_speculative_tokens + drafts.num_lookahead_tokens
        self.step_blocks = blocks_for(self._drafting, self._block_size)

    # Requests that hold blocks

    def head(self) -> Request | None:
        """Return the first request whose load has ended."""
        for request in self.holding:
            if request.status is not Status.LOADING:
                return request
        return None

    def admitted(self, request: Request, tokens: int) -> None:
        """Record that `request` runs now, and computes `tokens` tokens in the step being planned."""
        if request.id in self._prefills:
            self.holding.remove(request)
        elif request.computed + tokens < request.known:
            self._prefills[request.id] = request
        self.external.admitted(request)

    def planned(self, plan: StepPlan) -> None:
        """Record that `plan` is the next step: requests that sample in it have computed their prompts."""
        for request, _, _, samples, _ in plan.listed:
            if samples:
                self._prefills.pop(request.id, None)

    def committed(self, plan: StepPlan) -> None:
        """Free the blocks that `plan`, which has ended, was the last to write to."""
        while self.leaving and self.leaving[0][0] <= plan.seq:
            self._pool.release(self.leaving.popleft()[1])

    def preempted(self, request: Request) -> None:
        self._prefills.pop(request.id, None)

    def ended(self, request: Request, status: Status) -> bool:
        """Let `request` leave with `status`; return whether a load or another engine still needs its blocks."""
        if self._prefills.pop(request.id, None) is not None and request.status is not Status.RUNNING:
            self.holding.remove(request)
        if status is Status.FINISHED:
            return request.held > 0 and self.external.keeps(request)
        return request.status is Status.LOADING

    @property
    def reserved(self) -> int:
        """The blocks that must stay free when a load begins: blocks that prompts under way have still to take."""
        return self.step_blocks + sum(
            max(blocks_for(request.known + self._drafting, self._block_size) - request.held, 0)
            for request in self._prefills.values()
        )

    @property
    def deadlocked(self) -> bool:
        """True if all taken blocks belong to requests whose loads have ended, and there are such requests.

        If no request runs and none of them can, they wait for one another for ever.
        """
        taken = 0
        for request in self.holding:
            if request.status is Status.LOADING:
                return False
            if request.held:
                taken += request.held + self._state_blocks
        return len(self.holding) > 0 and taken == self._pool.total - self._pool.free

    # Loads

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens after the first `cached` to load.

        It is 0 if the drafts beside them would never fit: vLLM would wait for ever.
        """
        tokens = self.external.matched(request, cached)
        if tokens and self.step_blocks and not self.external.synchronous:
            need = blocks_for(cached + tokens, self._block_size) + self._state_blocks + self.step_blocks
            if need > self._pool.total:
                return 0
        return tokens

    def load(self, request: Request, hit: Hit, tokens: int) -> None:
        """Begin to load `tokens` tokens after the tokens of `hit`, into blocks that are taken for them."""
        cached = hit.blocks * self._block_size
        self._pool.admit(request, hit)
        self._pool.extend(request, cached + tokens)
        if request.first_hit is None:
            request.first_hit = cached
        request.loading = cached + tokens
        request.status = Status.LOADING
        request.passed_over = True
        if request.id not in self._prefills:  # else an earlier load has failed, and it has kept its place
            self._prefills[request.id] = request
            self.holding.add(request)
        self.external.load(request, cached, tokens)

    def loaded(self, request: Request) -> None:
        """Record that the KV of `load` is there. No request can find it before its request has had its turn."""
        if request.ended:
            self._pool.release(request)
        else:
            request.status = Status.WAITING

    def load_failed(self, request: Request) -> None:
        """Let the request wait without KV: the load has failed."""
        request.loading = 0
        self.loaded(request)

    def take(self, request: Request) -> None:
        """Take the turn of `request`, which holds blocks: make the loaded tokens its own, or release the blocks."""
        if request.loading:
            self._pool.register(request, request.loading)
            request.count_cached(
                min(request.loading, request.known - 1)
            )  # the last token has to be computed for the next
            request.loading = 0
        elif not request.computed:
            self._pool.release(request)
