"""KV outside an engine's own blocks, in slower memory or in another engine, and the requests that wait to load it.

A scheduler asks how much KV of a waiting request could be loaded instead of computed. If there is any, the request gets
blocks for it and has status LOADING, while other requests may pass it. When the KV has arrived, the request is admitted
before all requests that hold no blocks. A load begins only if it leaves enough blocks for the prompts that have begun
already. The rules are those of vLLM's KV connectors with asynchronous loads. An implementation of `ExternalKv` decides
which KV can be loaded, and how long a transfer takes.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.blocks import Hit, KvBlocks, blocks_for
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Scheduler, WaitingQueue
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest


class ExternalKv(Protocol):
    """The KV outside an engine, with the methods that the engine's scheduler calls."""

    @property
    def synchronous(self) -> bool:
        """True if the step that admits a request loads its KV; False if loads run beside other requests' steps."""
        ...

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens after the first `cached` can be loaded.

        The answer plus `cached` is at most `known`, or `known - 1` if loads are synchronous. The scheduler calls this
        method whenever it considers a waiting request, so it must not change anything.
        """
        ...

    def load(self, request: Request, start: int, tokens: int) -> None:
        """Begin to load the KV of `tokens` tokens from `start` on; the request has blocks for them and status LOADING.

        After this call has returned, call the scheduler's `loaded` or `load_failed` once. Do so even if the request was
        aborted meanwhile, because only then its blocks become free. If loads are synchronous, the request runs already,
        and no call is needed.
        """
        ...

    def admitted(self, request: Request) -> None:
        """Record that `request` runs from now on, with its cached or loaded tokens."""
        ...

    def keeps(self, request: Request) -> bool:
        """Return whether the blocks of `request`, which has finished, must be kept until `release` is called."""
        ...


class ExternalScheduler(Scheduler, Protocol):
    """A policy that can load KV, and that can keep KV for another engine."""

    def connect(self, external: ExternalKv) -> None:
        """Use `external` from now on."""
        ...

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        """Queue a request whose first `outputs` tokens another engine has sampled."""
        ...

    def loaded(self, request: Request) -> None:
        """Let the request run, because the load begun by `ExternalKv.load` has ended."""
        ...

    def load_failed(self, request: Request) -> None:
        """Let the request wait again without the KV, because the load has failed."""
        ...

    def release(self, request: Request) -> None:
        """Free the blocks that were kept because of `ExternalKv.keeps`."""
        ...


def connect(scheduler: Scheduler, external: ExternalKv) -> None:
    """Make `scheduler` use `external`. Raises UserError if its policy does not support it."""
    calls = ("connect", "loaded", "load_failed", "release")
    if not all(hasattr(scheduler, call) for call in calls):
        remedy = f"cannot load KV from outside, which takes {', '.join(calls)}; derive it from VllmScheduler"
        raise UserError("policy", type(scheduler).__name__, remedy)
    scheduler.connect(external)  # type: ignore[attr-defined]


class KvLoading:
    """The loads of one scheduler.

    Attributes:
        holding: waiting requests that hold KV blocks, or held them until their load failed, in order of admission
        step_blocks: number of blocks that the drafts of a step take
        leaving: (number of a step in flight, ended request) for each request whose blocks that step may still write to
    """

    def __init__(self, external: ExternalKv, pool: KvBlocks, config: SchedulerConfig, holding: WaitingQueue) -> None:
        self.external = external
        self.holding = holding
        self.leaving: deque[tuple[int, Request]] = deque()
        self._prefills: dict[int, Request] = {}  # requests in `holding`, and running requests with unfinished prompts
        self._pool = pool
        self._block_size = config.block_size
        self._state_blocks = config.state_blocks
        self._drafting = 0  # number of tokens beyond the known ones that a decode step takes blocks for
        if (drafts := config.speculative) is not None:
            self._drafting = 1 + drafts.num_speculative_tokens + drafts.num_lookahead_tokens
        self.step_blocks = blocks_for(self._drafting, self._block_size)

    # Requests that hold blocks

    def head(self) -> Request | None:
        """Return the first request in `holding` whose load has ended; None if there is none."""
        for request in self.holding:
            if request.status is not Status.LOADING:
                return request
        return None

    def admitted(self, request: Request, tokens: int) -> None:
        """Record that `request` runs from now on, and computes `tokens` tokens in the step being planned."""
        if request.id in self._prefills:
            self.holding.remove(request)
        elif request.computed + tokens < request.known:
            self._prefills[request.id] = request
        self.external.admitted(request)

    def planned(self, plan: StepPlan) -> None:
        """Record that `plan` will run. Requests that sample in it have computed their prompts."""
        for request, _, _, samples, _ in plan.listed:
            if samples:
                self._prefills.pop(request.id, None)

    def committed(self, plan: StepPlan) -> None:
        """Free the blocks of requests in `leaving` that no step after the ended `plan` writes to."""
        while self.leaving and self.leaving[0][0] <= plan.seq:
            self._pool.release(self.leaving.popleft()[1])

    def preempted(self, request: Request) -> None:
        self._prefills.pop(request.id, None)

    def ended(self, request: Request, status: Status) -> bool:
        """Remove `request`, which ends with `status`; return whether a load or another engine still needs its KV."""
        if self._prefills.pop(request.id, None) is not None and request.status is not Status.RUNNING:
            self.holding.remove(request)
        if status is Status.FINISHED:
            return request.block_count > 0 and self.external.keeps(request)
        return request.status is Status.LOADING

    @property
    def reserved(self) -> int:
        """The number of blocks that must stay free when a load begins, because prompts that have begun need them."""
        return self.step_blocks + sum(
            max(blocks_for(request.known + self._drafting, self._block_size) - request.block_count, 0)
            for request in self._prefills.values()
        )

    @property
    def deadlocked(self) -> bool:
        """True if there are requests whose loads have ended, and they hold all taken blocks.

        If no request runs and none of these can run, they wait for one another forever.
        """
        taken = 0
        for request in self.holding:
            if request.status is Status.LOADING:
                return False
            if request.block_count:
                taken += request.block_count + self._state_blocks
        return len(self.holding) > 0 and taken == self._pool.total - self._pool.free

    # Loads

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens after the first `cached` to load.

        The answer is 0 if the loaded tokens and the drafts of a step would never fit; vLLM would wait forever.
        """
        tokens = self.external.matched(request, cached)
        if tokens and self.step_blocks and not self.external.synchronous:
            need = blocks_for(cached + tokens, self._block_size) + self._state_blocks + self.step_blocks
            if need > self._pool.total:
                return 0
        return tokens

    def load(self, request: Request, hit: Hit, tokens: int) -> None:
        """Take blocks for `tokens` tokens after the tokens of `hit`, and begin to load their KV."""
        cached = hit.blocks * self._block_size
        self._pool.admit(request, hit)
        self._pool.extend(request, cached + tokens)
        if request.first_hit is None:
            request.first_hit = cached
        request.loading = cached + tokens
        request.status = Status.LOADING
        request.passed_over = True
        # otherwise an earlier load failed, and the request keeps its place in `holding`
        if request.id not in self._prefills:
            self._prefills[request.id] = request
            self.holding.add(request)
        self.external.load(request, cached, tokens)

    def loaded(self, request: Request) -> None:
        """Record that the load of `request` has ended. Others can find the KV only after the request's next turn."""
        if request.ended:
            self._pool.release(request)
        else:
            request.status = Status.WAITING

    def load_failed(self, request: Request) -> None:
        """Let the request wait without the KV, because the load has failed."""
        request.loading = 0
        self.loaded(request)

    def take(self, request: Request) -> None:
        """Begin the turn of `request`, which holds blocks: count its loaded tokens, or free blocks without KV."""
        if request.loading:
            self._pool.register(request, request.loading)
            request.count_cached(
                min(request.loading, request.known - 1)
            )  # the last known token must be computed to sample the next one
            request.loading = 0
        elif not request.computed:
            self._pool.release(request)
