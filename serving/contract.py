"""The contract that every policy keeps in every run: plans stay within the limits of the deployment.

The limits are those of the *deployment*, even if the policy assumes other limits. While requests wait, some request
must make progress. The contract never changes what a policy decides. A run checks only this part of the contract for
built-in policies, because the tests check the rest. For a user's own policy it checks the whole contract
(`user_code/own_contract.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NoReturn, cast

from mypy_extensions import mypyc_attr

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.external import ExternalKv, ExternalScheduler, connect
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import Scheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest

Rule = Literal["budget", "KV", "rows", "sums", "requests", "progress", "promises", "calls"]


class Breach(UserError):
    """The error of a policy that broke `rule`; its message names the step, the request and what the policy did."""

    def __init__(self, rule: Rule, policy: str, what: str) -> None:
        self.rule = rule
        super().__init__("policy", policy, what)


@mypyc_attr(allow_interpreted_subclasses=True)
class Contract:
    """The calls of an engine loop to `scheduler`, checked against `limits`. Raises `Breach` if a plan exceeds them.

    Attributes:
        step: number of the last plan
    """

    def __init__(self, policy: str, scheduler: Scheduler, limits: SchedulerConfig) -> None:
        self.policy = policy
        self.scheduler = scheduler
        self.limits = limits
        self.step = 0
        self.commit: Callable[..., list[Request]] = scheduler.commit
        self.steady_steps: Callable[[], int] = scheduler.steady_steps
        self._most_tokens = limits.most_step_tokens
        self._most_running = limits.most_running
        self._budget_name = "max_num_scheduled_tokens" if limits.max_num_scheduled_tokens else "max_num_batched_tokens"
        self._seats_name = "max_num_active_seqs" if limits.max_num_active_seqs else "max_num_seqs"
        self._blocks = limits.num_blocks - 1
        self._loads = False  # True if requests may wait for KV from outside the engine

    def schedule(self) -> StepPlan:
        scheduler = self.scheduler
        plan, pool = scheduler.schedule(), scheduler.pool
        free = pool.free
        self.step = plan.seq
        if (
            plan.prefill_tokens + plan.decode_rows + plan.draft_tokens > self._most_tokens
            or len(scheduler.running) > self._most_running
            or free < 0
            or pool.total - free > self._blocks
        ):
            self._refuse(plan)
        return plan

    @property
    def hold_ns(self) -> int:
        """The time for which the policy plans nothing, because more requests may come; 0 if it plans now."""
        hold_ns: int = getattr(self.scheduler, "hold_ns", 0)
        return hold_ns

    def hold_no_longer(self) -> None:
        """Tell the policy that `hold_ns` has passed."""
        self._call(self.scheduler.hold_no_longer)  # type: ignore[attr-defined]

    def must_get_on(self, plan: StepPlan) -> None:
        """Check that every waiting request has a reason to wait: a grammar, a KV load, or `hold_ns`.

        The loop calls this method if no step is in flight and `plan` is empty.
        """
        if self.hold_ns:
            return
        pool = self.scheduler.pool
        requests = [request for request in self.scheduler.requests.values() if not request.compiling]
        if requests and not (self._loads and pool.free < pool.total):
            waiting = f"{len(requests)} requests wait" if len(requests) > 1 else "it waits"
            self.breach("progress", f"plans nothing while {waiting} and no step runs", requests[0])

    def must_be_steady(self, plan: StepPlan) -> None:
        """Check that `plan` is one of the steady steps that `steady_steps` promised."""
        if plan.listed or plan.preempted or not plan.decode_rows:
            request = plan.listed[0].request if plan.listed else None
            self.breach("promises", "is not the decode set alone, as steady_steps() had promised", request)

    def skip(self, steps: int) -> list[Request]:
        finished = self.scheduler.skip(steps)
        self.step += steps
        if self.scheduler.pool.free < 0:
            self.breach("KV", f"takes more KV blocks than there are, in {steps} steady steps")
        return finished

    def add(self, arrived: WorkloadRequest) -> Request:
        return self.scheduler.add(arrived)

    def abort(self, id: int) -> Request | None:
        return self._call(self.scheduler.abort, id)

    @property
    def leaving(self) -> Collection[int]:
        """The ids of aborted requests that the policy keeps for one more step, as SGLang does; it returns no result."""
        leaving: Collection[int] = getattr(self.scheduler, "leaving", ())
        return leaving

    # KV from outside the engine

    def connect(self, external: ExternalKv) -> None:
        """Make the scheduler use `external`. Raises UserError if the policy does not support it."""
        self._loads = True
        self._call(connect, self.scheduler, external)

    def add_prefilled(self, arrived: WorkloadRequest, outputs: int) -> Request:
        return self._call(self._external.add, arrived, outputs)

    def loaded(self, request: Request) -> None:
        self._call(self._external.loaded, request)

    def load_failed(self, request: Request) -> None:
        self._call(self._external.load_failed, request)

    def release(self, request: Request) -> None:
        self._call(self._external.release, request)

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`, a call to the policy; subclasses override this method to check the call."""
        return call(*arguments)

    @property
    def _external(self) -> ExternalScheduler:
        return cast(ExternalScheduler, self.scheduler)

    # Breaches

    def breach(self, rule: Rule, what: str, request: Request | None = None) -> NoReturn:
        """Raise a `Breach` with a one-line message: the step, the request and what the policy did."""
        where = f"step {self.step}" if request is None else f"step {self.step}, request {request.id}"
        raise Breach(rule, self.policy, f"{where}: {what}")

    def _refuse(self, plan: StepPlan) -> NoReturn:
        running, pool, blocks = self.scheduler.running, self.scheduler.pool, self._blocks
        last = next(reversed(running.values()), None)
        if plan.tokens > self._most_tokens:
            largest = max(plan.listed, key=lambda row: row.tokens, default=None)
            what = f"plans {plan.tokens} tokens; the deployment's {self._budget_name} is {self._most_tokens}"
            self.breach("budget", what, largest.request if largest else last)
        if len(running) > self._most_running:
            what = f"runs {len(running)} requests; the deployment's {self._seats_name} is {self._most_running}"
            self.breach("budget", what, last)
        taken = pool.total - pool.free
        what = f"holds {taken} KV blocks; there are {blocks}, by the deployment's num_blocks {blocks + 1}"
        self.breach("KV", what, last)
