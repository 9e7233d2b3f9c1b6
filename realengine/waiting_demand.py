"""The KV blocks that waiting requests would need, updated as they come and go.

A step must never cost more for a longer queue.
"""

from __future__ import annotations

from serving.deployments.config import SchedulerConfig
from serving.deployments.kv_groups import most_held
from serving.request import Request
from serving.step_plan import StepPlan


class WaitingDemand:
    """The demand of waiting requests; `blocks` is what all their known tokens would take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._of: dict[int, int] = {}
        self.blocks = 0

    def wait(self, request: Request) -> None:
        """Count a request that waits from now on, or waits already and has another known token."""
        self.leave(request.id)
        need = self._of[request.id] = most_held(self._config, request.known)
        self.blocks += need

    def leave(self, id: int) -> None:
        """Stop counting a request, if it was counted."""
        self.blocks -= self._of.pop(id, 0)

    def follow(self, plan: StepPlan) -> None:
        """Count preempted requests, and stop counting admitted ones."""
        for request in plan.preempted:
            self.wait(request)
        for request in plan.admitted:
            self.leave(request.id)

    def returned(self, request: Request) -> None:
        """Note a new token of a request; a preempted request may still get one from an earlier step."""
        if request.id in self._of:
            self.wait(request)
