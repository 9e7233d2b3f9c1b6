"""The whole contract, for a user's own policy, which is trusted in nothing.

Beside the limits: every row of a plan is of one live request and says what that request says, a promise of steady
steps is one that can be kept, and whatever the policy raises, or does instead of returning, becomes one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

from serving.call_limit import CallWatch, Fault
from serving.contract import Contract
from serving.deployments.config import SchedulerConfig
from serving.errors import UserError
from serving.request import Request
from serving.scheduler import POLICIES, Scheduler
from serving.step_plan import StepPlan
from serving.workload import WorkloadRequest

_PARTS = ("config", "requests", "running", "waiting", "decodes", "pool")
_MOST_EMPTY_PLANS = 10_000  # in a row, that preempt and run nothing


class OwnContract(Contract):
    """`watch` ends calls that take too long."""

    def __init__(self, policy: str, scheduler: Scheduler, limits: SchedulerConfig, watch: CallWatch) -> None:
        missing = [name for name in _PARTS if not hasattr(scheduler, name)]
        if missing:
            remedy = f"makes a scheduler that lacks {', '.join(missing)}; see docs/policies.md"
            raise UserError("policy", policy, remedy)
        super().__init__(policy, scheduler, limits)
        self.commit = self._commit
        self.steady_steps = self._steady_steps
        self._watch = watch
        self._empty_plans = 0

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the policy returns. Whatever it raises instead, and that it takes too long, is a breach."""
        try:
            return self._watch.call(call, *arguments)
        except Fault as fault:
            self.breach(fault.rule, fault.what, _request_at_hand(fault.__cause__))

    # A plan

    def schedule(self) -> StepPlan:
        plan = self._call(super().schedule)
        self._check_rows(plan)
        rows = plan.prefill_rows + plan.decode_rows
        if rows > self._most_running:
            self.breach("budget", f"plans {rows} rows; the deployment's max_num_seqs is {self._most_running}")
        self._check_decodes()
        if plan.tokens or not plan.preempted:
            self._empty_plans = 0
        elif (count := self._empty_plans + 1) > _MOST_EMPTY_PLANS:
            self.breach("progress", f"has preempted in {count} plans in a row, and run nothing", plan.preempted[0])
        else:
            self._empty_plans = count
        return cast(StepPlan, plan)

    def _check_rows(self, plan: StepPlan) -> None:
        scheduler, block_size = self.scheduler, self.limits.block_size
        seen: set[int] = set()
        for request, start, tokens, _, drafts in plan.listed:
            end = start + tokens
            if request.id in seen or (request.decodes is not None and request.joined < plan.clock):
                self.breach("rows", "is planned twice in one step", request)
            seen.add(request.id)
            if start < 0 or not 0 <= drafts < tokens:
                self.breach("rows", f"plans {tokens} tokens after {start}, {drafts} of them drafts", request)
            if scheduler.requests.get(request.id) is not request or request.id not in scheduler.running:
                self.breach("rows", "is planned, but does not run", request)
            if end != request.computed or request.pending < 1:
                what = f"plans {tokens} tokens after {start}, which are not the next of {request!r}"
                self.breach("rows", what, request)
            if request.held * block_size < end:
                what = f"computes tokens up to {end} and holds {request.held} KV blocks of {block_size}"
                self.breach("KV", what, request)

    def _check_decodes(self) -> None:
        """In O(1): the decode set is of this deployment's blocks and, where nothing is shared, it holds enough."""
        decodes, pool, block_size = self.scheduler.decodes, self.scheduler.pool, self.limits.block_size
        held = pool.total - pool.free
        if decodes.block_size != block_size:
            what = f"has KV blocks of {decodes.block_size} tokens; the deployment's block_size is {block_size}"
            self.breach("KV", what)
        if pool.counts_only and decodes.context > held * block_size:
            self.breach("KV", f"decodes over {decodes.context} tokens and holds {held} KV blocks of {block_size}")

    # Many steps at once

    def _steady_steps(self) -> int:
        steps = self._call(self.scheduler.steady_steps)
        if type(steps) is not int or steps < 0:
            what = f"steady_steps() is {steps!r}; it must be a whole number, 0 where the policy cannot tell"
            self.breach("promises", what)
        if steps:
            decodes, running = self.scheduler.decodes, len(self.scheduler.running)
            rows = len(decodes.members)
            if not 0 < rows <= self._most_tokens or rows != running:
                self.breach("promises", f"promises {steps} steady steps of {rows} decodes; {running} requests run")
            if steps > decodes.steps_to_exit():
                self.breach("promises", f"promises {steps} steady steps; one ends in {decodes.steps_to_exit()}")
            blocks, free = self.scheduler.pool.ahead(decodes, steps), self.scheduler.pool.free
            if blocks > free:
                self.breach("promises", f"promises {steps} steady steps; they take {blocks} KV blocks, {free} are free")
        return steps

    def skip(self, steps: int) -> list[Request]:
        finished = self._call(super().skip, steps)
        self._check_decodes()
        return cast(list[Request], finished)

    # The other calls

    def add(self, arrived: WorkloadRequest) -> Request:
        request = self._call(super().add, arrived)
        if not isinstance(request, Request):
            self.breach("calls", f"add() returned {request!r} for request {arrived.id}, which is no Request")
        return request

    def _commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        finished = self._call(self.scheduler.commit, plan, stopped)
        if not isinstance(finished, list):
            self.breach("calls", f"commit() returned {finished!r}, which is no list of requests")
        for request in finished:
            if not request.ended or request.id in self.scheduler.requests:
                self.breach("calls", f"commit() returned {request!r}, which has not ended", request)
        return finished


def contract_with(policy: str, scheduler: Scheduler, limits: SchedulerConfig, watch: CallWatch) -> Contract:
    """The contract of the scheduler that the policy called `policy` has made."""
    if policy in POLICIES:
        return Contract(policy, scheduler, limits)
    return OwnContract(policy, scheduler, limits, watch)


def _request_at_hand(error: BaseException | None) -> Request | None:
    """The request that the innermost call with one was about."""
    at_hand, frame = None, error.__traceback__ if error else None
    while frame is not None:
        found = frame.tb_frame.f_locals.get("request")
        at_hand = found if isinstance(found, Request) else at_hand
        frame = frame.tb_next
    return at_hand
