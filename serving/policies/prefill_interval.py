"""The `prefill_schedule_interval` of vLLM: prompts get tokens once in so many steps; steps between only decode."""

from __future__ import annotations

from collections.abc import Iterable

from serving.request import Request
from serving.step_plan import StepPlan


class PrefillInterval:
    """The interval of one scheduler, which begins anew with each step that computes prompts.

    No prompt is held back if the last step that was to admit requests has left any waiting that could have run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._since = steps  # steps that ran since the last one that computed prompts
        self._backlog = False  # True if requests were left waiting

    @property
    def holds_prompts(self) -> bool:
        """True if the next step leaves prompts alone, provided that a request decodes in it."""
        return not self._backlog and self._since + 1 < self._steps

    def planned(self, plan: StepPlan, prefills: bool, held_back: bool, waiting: Iterable[Request]) -> None:
        """Record a final `plan`, whether it computes prompts, and whether it has held any back."""
        self._since = 0 if prefills else self._since + bool(plan.tokens)
        if not held_back and not plan.preempted:
            self._look_for_backlog(waiting)

    def skipped(self, steps: int, waiting: Iterable[Request]) -> None:
        """Record that `steps` steps of decodes alone were planned."""
        self._since += steps
        if self._backlog or self._since >= self._steps:
            self._look_for_backlog(waiting)

    def _look_for_backlog(self, waiting: Iterable[Request]) -> None:
        self._backlog = any(not request.passed_over for request in waiting)
