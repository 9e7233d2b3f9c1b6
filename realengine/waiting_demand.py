"""The KV blocks that waiting requests would need, kept as they come and go: a step must never cost more for a longer
queue."""

from __future__ import annotations

from serving.deployments.config import SchedulerConfig
from serving.deployments.kv_groups import most_held
from serving.request import Request
from serving.step_plan import StepPlan


class WaitingDemand:
    """`blocks` is what all that is known of the waiting requests would take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._of: dict[int, int] = {}
        self.blocks = 0

    def wait(self, request: Request) -> None:
        """It waits from now on, or does already and another token of it is known."""
        self.leave(request.id)
        need = self._of[request.id] = most_held(self._config, request.known)
        self.blocks += need

    def leave(self, id: int) -> None:
        """It waits no longer, if it ever did."""
        self.blocks -= self._of.pop(id, 0)

    def follow(self, plan: StepPlan) -> None:
        """Who was preempted waits; who was admitted does not."""
        for request in plan.preempted:
            self.wait(request)
        for request in plan.admitted:
            self.leave(request.id)

    def returned(self, request: Request) -> None:
        """A token of it has come; a preempted request may get one of a step before."""
        if request.id in self._of:
            self.wait(request)
