"""Pipeline stages: when each step starts and ends.

A stage works on one step at a time, in the order of planning. Step m starts on stage s when its activations from stage
s - 1 have arrived and stage s is done with step m - 1. Sending activations keeps neither stage busy. With p stages that
take equal times, the last of m steps ends after m + p - 1 stage times (the bubble of Huang et al., "GPipe", 2019).

In the overlapped loop, a step is planned before its input tokens are known, and the last stage sends them to the first.
As in vLLM, plan m waits there for the tokens of plan m - p; empty plans count, too.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tokentwin.serving.cost_model import CostModel, PipelinedCost
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan


class Passage(NamedTuple):
    """The times of a step: its start on the first stage, its end on the last, and the time that each stage takes."""

    start_ns: int
    end_ns: int
    stages_ns: list[int]


class Stages:
    """The stages of an engine. `free_ns` is the time at which each stage is done with all steps so far."""

    def __init__(self, stages: int) -> None:
        self.free_ns = [0] * stages

    def passed(self, ready_ns: int, stages_ns: list[int], transfers_ns: list[int]) -> Passage:
        """Send a step through the stages, not before `ready_ns`, and return its times.

        `stages_ns` are its times on the stages; `transfers_ns` are its transfer times to each stage but the first.
        """
        free_ns = self.free_ns
        at_ns = start_ns = max(ready_ns, free_ns[0])
        for stage, (transfer_ns, ns) in enumerate(zip((0, *transfers_ns), stages_ns, strict=True)):
            free_ns[stage] = at_ns = max(at_ns + transfer_ns, free_ns[stage]) + ns
        return Passage(start_ns, at_ns, stages_ns)


class Pipeline:
    """A pipeline of `stages` stages, priced by `cost`. Raises UserError if `cost` does not know stages."""

    def __init__(self, cost: CostModel, stages: int) -> None:
        self._stages = Stages(stages)
        self._tokens_ns = deque([0] * stages, stages)  # times at which the tokens of the last plans are there
        self.price_by(cost)

    def price_by(self, cost: CostModel) -> None:
        """Use the cost model `cost` for steps from now on."""
        if not isinstance(cost, PipelinedCost):
            stages = len(self._stages.free_ns)
            raise UserError("pipeline_parallel_size", stages, "needs the kernel tables of a GPU; simulate with --gpu")
        self._cost = cost

    def enter(self, plan: StepPlan, ready_ns: int) -> Passage:
        """Send `plan` through the stages after earlier steps, not before `ready_ns`, and return its times."""
        return self._stages.passed(ready_ns, *self.times_ns(plan))

    @property
    def tokens_ns(self) -> int:
        """The time at which the first stage has the tokens that the next plan of the overlapped loop may need."""
        return self._tokens_ns[0]

    def sampled(self, end_ns: int) -> None:
        """Record when the tokens of the next plan in order are available; 0 if the plan samples none."""
        self._tokens_ns.append(end_ns)

    def times_ns(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Return the times of `plan` on each stage, and its transfer times to each stage but the first."""
        return self._cost.stages_ns(plan), self._cost.transfers_ns(plan)
