"""The whole contract, for a user's own policy, which may have mistakes.

In addition to the limits, it checks three things: every row of a plan belongs to one live request and agrees with that
request, a separate account of the requests agrees with the policy (`audit.py`), and a promise of steady steps can be
kept. If the policy raises an exception, the user gets a one-line error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

from tokentwin.serving.contract import Contract
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError, shown
from tokentwin.serving.kv.external import ExternalKv
from tokentwin.serving.predictions import predicted_tokens
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import POLICIES, Scheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.user_code.audit import Audit
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.serving.workload import WorkloadRequest, as_it_is

_PARTS = ("config", "requests", "running", "waiting", "decodes", "pool")
_MOST_EMPTY_PLANS = 10_000  # maximum number of consecutive plans that preempt requests and run nothing


class OwnContract(Contract):
    """The contract of a user's own policy, which may do anything."""

    def __init__(self, policy: str, scheduler: Scheduler, limits: SchedulerConfig, by_segments: bool) -> None:
        missing = [name for name in _PARTS if not hasattr(scheduler, name)]
        if missing:
            remedy = f"makes a scheduler that lacks {', '.join(missing)}; see docs/policies.md"
            raise UserError("policy", policy, remedy)
        super().__init__(policy, scheduler, limits)
        self.commit = self._commit
        self.steady_steps = self._steady_steps
        self._empty_plans = 0
        self._audit = Audit(scheduler, limits, self.breach, by_segments)
        self._stagger = limits.decode_stagger
        self._plans = 0
        self._leaving: set[int] = set()  # aborted requests whose account is open, because they run for one more step
        self._eligible: dict[int, int] = {}  # by request id: first plan that may compute its next token

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`. An exception is a breach."""
        try:
            return limited(call, *arguments)
        except Fault as fault:
            self.breach("calls", fault.what, _request_at_hand(fault.__cause__))

    # Plans

    def schedule(self) -> StepPlan:
        plan = self._call(super().schedule)
        self._check_rows(plan)
        if self._stagger > 1:
            self._check_stagger(plan)
        rows = plan.prefill_rows + plan.decode_rows
        if rows > self._most_running:
            self.breach("budget", f"plans {rows} rows; the deployment's {self._seats_name} is {self._most_running}")
        self._check_decodes()
        self._audit.planned(plan)
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
            if request.compiling:
                self.breach("rows", "is planned while its grammar is being compiled", request)
            if request.id in seen or (request.decodes is not None and request.joined < plan.clock):
                self.breach("rows", "is planned twice in one step", request)
            seen.add(request.id)
            if start < 0 or not 0 <= drafts < tokens:
                self.breach("rows", f"plans {tokens} tokens after {start}, {drafts} of them drafts", request)
            here = scheduler.requests.get(request.id) is request or request.id in self._leaving
            if not here or request.id not in scheduler.running:
                self.breach("rows", "is planned, but does not run", request)
            if end != request.computed or request.pending < 1:
                what = f"plans {tokens} tokens after {start}, which are not the next of {shown(request)}"
                self.breach("rows", what, request)
            if request.block_count * block_size < end and self.limits.kv_reservation != "none":
                what = f"computes tokens up to {end} and holds {request.block_count} KV blocks of {block_size}"
                self.breach("KV", what, request)

    def _check_stagger(self, plan: StepPlan) -> None:
        """Check that no request decodes again while its last token is still in the pipeline."""
        self._plans += 1
        self._eligible = {id: first for id, first in self._eligible.items() if first > self._plans}
        again = [m for m in self.scheduler.decodes.members.values() if m.joined < plan.clock]
        again += [row.request for row in plan.listed if row.request.id in self._eligible]
        if again:
            what = f"decodes again in fewer than {self._stagger} plans, the deployment's pipeline_parallel_size"
            self.breach("rows", what, again[0])
        for request, _, _, samples, _ in plan.listed:
            if samples:
                self._eligible[request.id] = self._plans + self._stagger

    def _check_decodes(self) -> None:
        """Check that the decode set has the deployment's block size and, if nothing is shared, enough blocks.

        The check takes O(1) time.
        """
        decodes, pool, block_size = self.scheduler.decodes, self.scheduler.pool, self.limits.block_size
        taken = pool.total - pool.free
        if decodes.block_size != block_size:
            what = f"has KV blocks of {decodes.block_size} tokens; the deployment's block_size is {block_size}"
            self.breach("KV", what)
        if pool.counts_only and decodes.context > taken * block_size:
            self.breach("KV", f"decodes over {decodes.context} tokens and holds {taken} KV blocks of {block_size}")

    # Many steps at once

    def _steady_steps(self) -> int:
        steps = self._call(self.scheduler.steady_steps)
        if type(steps) is not int or steps < 0:
            what = f"steady_steps() is {shown(steps)}; it must be a whole number, 0 where the policy cannot tell"
            self.breach("promises", what)
        if steps:
            self._audit.check_decodes()
            decodes, running = self.scheduler.decodes, len(self.scheduler.running)
            rows = len(decodes.members)
            if not 0 < rows <= self._most_tokens or rows != running:
                self.breach("promises", f"promises {steps} steady steps of {rows} decodes; {running} requests run")
            if steps > decodes.true_steps_to_exit():
                self.breach("promises", f"promises {steps} steady steps; one ends in {decodes.true_steps_to_exit()}")
            blocks, free = self.scheduler.pool.net_blocks(decodes, steps), self.scheduler.pool.free
            if blocks > free:
                self.breach("promises", f"promises {steps} steady steps; they take {blocks} KV blocks, {free} are free")
        return steps

    def skip(self, steps: int) -> list[Request]:
        finished = self._finished("skip", self._call(super().skip, steps))
        self._check_decodes()
        self._audit.skipped(steps, finished)
        return finished

    # Other calls

    def add(self, arrived: WorkloadRequest) -> Request:
        return self._add(arrived, super().add, 0)

    def add_prefilled(self, arrived: WorkloadRequest, outputs: int) -> Request:
        return self._add(arrived, self._external.add, outputs)

    def _add(self, arrived: WorkloadRequest, call: Callable[..., Any], outputs: int) -> Request:
        error, seed = self.limits.sjf_error, self.limits.sjf_seed
        predicted = predicted_tokens(arrived.output_len, error, seed, arrived.id) if error else None
        view = arrived.server_view(predicted)
        came = as_it_is(arrived), as_it_is(view)
        request = self._call(call, view, outputs) if outputs else self._call(call, view)
        if not isinstance(request, Request):
            self.breach("calls", f"add() returned {shown(request)} for request {arrived.id}, which is no Request")
        self._close_accounts()
        if view is not arrived and request.arrived is view:
            request.hide(arrived)
        self._audit.added(request, arrived, view, came, outputs)
        return request

    def abort(self, id: int) -> Request | None:
        request = super().abort(id)
        self._leaving.add(id)
        self._close_accounts()
        return request

    def _close_accounts(self) -> None:
        for id in [id for id in self._leaving if id not in self.leaving]:
            self._leaving.remove(id)
            self._audit.aborted(id)

    def connect(self, external: ExternalKv) -> None:
        super().connect(external)
        self._audit.external = True

    def must_get_on(self, plan: StepPlan) -> None:
        self._call(super().must_get_on, plan)

    def _commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        finished = self._finished("commit", self._call(self.scheduler.commit, plan, stopped))
        self._audit.ended(plan.seq, stopped, finished)
        self._close_accounts()
        return finished

    def _finished(self, call: str, finished: Any) -> list[Request]:
        if not isinstance(finished, list):
            self.breach("calls", f"{call}() returned {shown(finished)}, which is no list of requests")
        for request in finished:
            if not isinstance(request, Request):
                self.breach("calls", f"{call}() returned {shown(request)}, which is no request")
            if not request.ended or request.id in self.scheduler.requests:
                self.breach("calls", f"{call}() returned {shown(request)}, which has not ended", request)
        return finished


def contract_with(policy: str, scheduler: Scheduler, limits: SchedulerConfig, by_segments: bool = False) -> Contract:
    """Return the contract of `scheduler`, which the policy called `policy` has made.

    `by_segments` is True if requests share tokens only by equal segments, and not by the values of their tokens.
    """
    if policy in POLICIES:
        return Contract(policy, scheduler, limits)
    return OwnContract(policy, scheduler, limits, by_segments)


def _request_at_hand(error: BaseException | None) -> Request | None:
    """Return the variable `request` of the innermost frame of the traceback that has one; None if there is none."""
    at_hand, frame = None, error.__traceback__ if error else None
    while frame is not None:
        request = frame.tb_frame.f_locals.get("request")
        at_hand = request if isinstance(request, Request) else at_hand
        frame = frame.tb_next
    return at_hand
