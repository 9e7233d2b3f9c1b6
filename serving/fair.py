"""The `fair` policy: tenants share the engine by the virtual token counter of Sheng et al. (OSDI 2024).

Service is what a tenant is given: `fair_input_weight` a prompt token, charged whole at first admission, and
`fair_output_weight` an output token, charged when its step is planned. Computing again what a preemption threw away is
no service. The policy is work-conserving: an idle tenant's share goes to the others.
"""

from __future__ import annotations

from serving.config import SchedulerConfig
from serving.content import Content
from serving.decode_set import DecodeSet
from serving.request import Request
from serving.step_plan import StepPlan
from serving.tenant_queue import ServiceCounters, TenantQueue
from serving.vllm import VllmScheduler
from serving.waiting import WaitingQueue


class FairScheduler(VllmScheduler):
    """Admits for the tenant served least so far and preempts the tenant served most; otherwise as `vllm`.

    counters  service of each tenant so far
    """

    waiting: TenantQueue

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None:
        self.counters = ServiceCounters(lambda: self.decodes.clock, config.fair_output_weight)
        super().__init__(config, shares_prefixes=shares_prefixes, content=content)
        self.decodes = _ServedDecodes(config.block_size, self.counters)
        self._forgets_withdrawn = True  # a victim may have had its tokens of this step already

    def _queue(self) -> WaitingQueue:
        return TenantQueue(self.counters, super()._queue)

    def _victim(self) -> Request:
        """Of the tenant served most, the least urgent or the last to have been admitted."""
        by_priority = self.config.policy == "priority"

        def expendable(request: Request) -> tuple[int, int, int]:
            service = self.counters.of(request.arrived.tenant)
            return service, request.priority if by_priority else 0, request.admitted

        return max(self.running.values(), key=expendable)

    # Charging

    def _admit(self, plan: StepPlan, request: Request, budget: int, threshold: int) -> int:
        tokens = super()._admit(plan, request, budget, threshold)
        if tokens and not request.preemptions:
            self.counters.charge(request.arrived.tenant, self.config.fair_input_weight * request.prompt_len)
        return tokens

    def _take(self, plan: StepPlan, request: Request, tokens: int) -> int:
        sampled = plan.sampled_rows
        super()._take(plan, request, tokens)
        self._charge_output(request, plan.sampled_rows - sampled)
        return tokens

    def _preempt(self, plan: StepPlan, request: Request) -> int:
        sampled = plan.sampled_rows
        tokens = super()._preempt(plan, request)
        self._charge_output(request, plan.sampled_rows - sampled)  # its row may have been withdrawn
        return tokens

    def _charge_output(self, request: Request, tokens: int) -> None:
        self.counters.charge(request.arrived.tenant, self.config.fair_output_weight * tokens)

    def _verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        accepted = super()._verify(plan, request, drafts)
        self._charge_output(request, accepted)
        return accepted

    # Leaps

    def steady_steps(self) -> int:
        steps = super().steady_steps()
        if not steps or not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return steps
        if self._external is not None and any(request.loading for request in self.waiting):
            return 0  # who is first is then not the tenant served least
        return min(steps, self._ticks_as_head(steps))

    def _ticks_as_head(self, most: int) -> int:
        """For how many ticks of the decode set, up to `most`, the same tenant stays first."""
        counters = self.counters
        service, first = min((counters.of(tenant), tenant) for tenant in self.waiting.tenants)
        for tenant in self.waiting.tenants:
            closing = counters.slope(first) - counters.slope(tenant)
            if closing > 0:
                most = min(most, (counters.of(tenant) - service - (tenant < first)) // closing)
        return most


class _ServedDecodes(DecodeSet):
    """A decode set that says whom it serves."""

    def __init__(self, block_size: int, counters: ServiceCounters) -> None:
        super().__init__(block_size)
        self._counters = counters

    def join(self, request: Request) -> None:
        super().join(request)
        self._counters.joined(request.arrived.tenant)

    def leave(self, request: Request) -> None:
        super().leave(request)
        self._counters.left(request.arrived.tenant)
