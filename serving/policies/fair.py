"""The `fair` policy: tenants share the engine by the virtual token counter.

The virtual token counter is algorithm 2 of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each
tenant has a counter, which grows with the tokens that it is served. The next request is the first request of the tenant
with the smallest counter. When an idle tenant comes back, its counter is raised to that of its competitors, so that it
gains nothing by idling. An idle tenant's share goes to the others.

A tenant is charged `fair_input_weight` for each prompt token, all at the first admission, and `fair_output_weight` for
each output token, when its step is planned. Recomputing tokens after a preemption is not charged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop
from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import WaitingQueue
from tokentwin.serving.step_plan import StepPlan


class ServiceCounters:
    """The counters of all tenants, in weighted tokens.

    A member of the decode set gets one output token at every tick of the set's clock. The counter of its tenant is
    therefore a linear function of that clock, and a tick takes no time here.
    """

    def __init__(self, clock: Callable[[], int], per_prompt_token: int, per_output_token: int) -> None:
        self._clock = clock
        self._per_prompt_token = per_prompt_token
        self._per_output_token = per_output_token  # also the service of one member in one tick
        self._base: dict[str, int] = {}
        self._members: dict[str, int] = {}

    def service_of(self, tenant: str) -> int:
        """Return the tenant's service so far, in weighted tokens."""
        return self._base.get(tenant, 0) + self.slope(tenant) * self._clock()

    def slope(self, tenant: str) -> int:
        """Return the service that one tick of the decode set adds to the tenant."""
        return self._per_output_token * self._members.get(tenant, 0)

    def charge(self, tenant: str, service: int) -> None:
        self._base[tenant] = self._base.get(tenant, 0) + service

    def lift(self, tenant: str, to: int) -> None:
        self.charge(tenant, max(to - self.service_of(tenant), 0))

    # Called by the scheduler

    def admitted(self, request: Request) -> None:
        self.charge(request.arrived.tenant, self._per_prompt_token * request.prompt_len)

    def sampled(self, request: Request, tokens: int) -> None:
        self.charge(request.arrived.tenant, self._per_output_token * tokens)

    def joined(self, request: Request) -> None:
        tenant = request.arrived.tenant
        self.charge(tenant, -self._per_output_token * self._clock())
        self._members[tenant] = self._members.get(tenant, 0) + 1

    def left(self, request: Request) -> None:
        tenant = request.arrived.tenant
        self.charge(tenant, self._per_output_token * self._clock())
        self._members[tenant] -= 1


class TenantQueue:
    """A queue with the tenant with the smallest counter first; tenants with equal counters are ordered by name.

    `queue` makes the queue that orders the requests of one tenant.
    """

    def __init__(self, counters: ServiceCounters, queue: Callable[[], WaitingQueue]) -> None:
        self._counters = counters
        self._new_queue = queue
        self._queues: dict[str, WaitingQueue] = {}  # queues of tenants with waiting requests
        self._length = 0
        self._last_left: str | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        order = [(self._counters.service_of(tenant), tenant) for tenant in self._queues]
        heapify(order)
        while order:
            yield from self._queues[heappop(order)[1]]

    def add(self, request: Request) -> None:
        self._queue_of(request.arrived.tenant).add(request)
        self._length += 1

    def put_back(self, request: Request) -> None:
        self._queue_of(request.arrived.tenant).put_back(request)
        self._length += 1

    def remove(self, request: Request) -> None:
        tenant = request.arrived.tenant
        self._queues[tenant].remove(request)
        self._length -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last_left = tenant

    def steps_at_head(self, head: Request, steps: int) -> int:
        """Return the number of steps until another tenant becomes the first, by counter and then by name."""
        counters = self._counters
        service, first = min((counters.service_of(tenant), tenant) for tenant in self._queues)
        if head.arrived.tenant != first:  # the waiting requests of this tenant are being loaded
            return 0
        for tenant in self._queues:
            closing = counters.slope(first) - counters.slope(tenant)
            if closing > 0:
                steps = min(steps, (counters.service_of(tenant) - service - (tenant < first)) // closing)
        return steps

    def _queue_of(self, tenant: str) -> WaitingQueue:
        """Return the queue of `tenant`. The counter of a tenant without waiting requests is raised first."""
        if tenant not in self._queues:
            if self._queues:
                self._counters.lift(tenant, min(map(self._counters.service_of, self._queues)))
            elif self._last_left is not None:
                self._counters.lift(tenant, self._counters.service_of(self._last_left))
            self._queues[tenant] = self._new_queue()
        return self._queues[tenant]


class FairScheduler(VllmScheduler):
    """A scheduler that admits the tenant with the least service and preempts the one with the most; else as `vllm`.

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
        """Return the least urgent or last admitted request of the tenant with the most service before this step.

        Tokens of this step do not count. Otherwise a request could be preempted because of the token that it gets in
        this step, lose that token with the preemption, and repeat this forever.
        """
        by_priority = self.config.policy == "priority"

        def expendable(request: Request) -> tuple[int, int, int]:
            service = self._served[request.arrived.tenant]
            return service, request.priority if by_priority else 0, request.admitted

        return max(self.running.values(), key=expendable)
