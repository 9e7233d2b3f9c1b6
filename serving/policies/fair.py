"""The `fair` policy: tenants share the engine by the virtual token counter of Sheng et al. (OSDI 2024).

Service is what a tenant is given: `fair_input_weight` a prompt token, charged whole at first admission, and
`fair_output_weight` an output token, charged when its step is planned. Computing again what a preemption threw away is
no service. The policy is work-conserving: an idle tenant's share goes to the others.
"""

from __future__ import annotations

from typing import Any

from serving.deployments.config import SchedulerConfig
from serving.policies.tenant_queue import ServiceCounters, TenantQueue
from serving.policies.vllm import VllmScheduler
from serving.request import Request
from serving.step_plan import StepPlan
from serving.waiting import WaitingQueue


class FairScheduler(VllmScheduler):
    """A scheduler that admits for the tenant served least so far and preempts the tenant served most; else as `vllm`.

    Attributes:
        counters: service of each tenant so far
    """

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        self.counters = ServiceCounters(lambda: self.decodes.clock, config.fair_input_weight, config.fair_output_weight)
        super().__init__(config, **engine)
        self.service = self.decodes.listener = self.counters
        self._served: dict[str, int] = {}  # service of each tenant before the step that is being planned

    def new_queue(self) -> WaitingQueue:
        return TenantQueue(self.counters, super().new_queue)

    def _serve_one_by_one(self, plan: StepPlan, budget: int) -> int:
        self._served = {(tenant := r.arrived.tenant): self.counters.service_of(tenant) for r in self.running.values()}
        return super()._serve_one_by_one(plan, budget)

    def victim(self) -> Request:
        """Return the least urgent request, or the last admitted, of the tenant served most before this step.

        If a token of this very step counted, it could cost its request the place, and be withdrawn with it, for ever.
        """
        by_priority = self.config.policy == "priority"

        def expendable(request: Request) -> tuple[int, int, int]:
            service = self._served[request.arrived.tenant]
            return service, request.priority if by_priority else 0, request.admitted

        return max(self.running.values(), key=expendable)
