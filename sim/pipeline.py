"""The stages that steps pass one after another: when each step starts and ends.

A stage works on one step at a time, in the order of planning. Stage s of step m starts when the activations of its
stage s - 1 have arrived and the stage is done with step m - 1; sending them keeps neither stage busy. With m steps of
equal stages the last one ends after m + p - 1 stage times (the bubble of Huang et al., "GPipe", 2019).

In the overlapped loop a step is planned before the tokens that it computes on are known, and the last stage sends them
to the first: vLLM's plan m waits there for the tokens of plan m - p, plans that run nothing included.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from serving.cost_model import CostModel, PipelinedCost
from serving.errors import UserError
from serving.step_plan import StepPlan


class Passage(NamedTuple):
    """A step's way through: start on the first stage, end on the last, and how long each stage worked on it."""

    start_ns: int
    end_ns: int
    stages_ns: list[int]


class Stages:
    """The stages of an engine; `free_ns` says when each of them is done with all steps before."""

    def __init__(self, stages: int) -> None:
        self.free_ns = [0] * stages

    def passed(self, ready_ns: int, stages_ns: list[int], transfers_ns: list[int]) -> Passage:
        """Pass a step through the stages, not before `ready_ns`.

        It takes `stages_ns` on each stage, and `transfers_ns` to get to each but the first.
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
        self._tokens_ns = deque([0] * stages, stages)  # times when the tokens of the last plans were there
        self.price_by(cost)

    def price_by(self, cost: CostModel) -> None:
        """Price steps that enter from now on by `cost`."""
        if not isinstance(cost, PipelinedCost):
            stages = len(self._stages.free_ns)
            raise UserError("pipeline_parallel_size", stages, "needs the kernel tables of a GPU; simulate with --gpu")
        self._cost = cost

    def enter(self, plan: StepPlan, ready_ns: int) -> Passage:
        """Let `plan` follow the steps before it, not before `ready_ns`."""
        return self._stages.passed(ready_ns, *self.times_ns(plan))

    @property
    def tokens_ns(self) -> int:
        """The time when the tokens that the next plan of the overlapped loop may need are on the first stage."""
        return self._tokens_ns[0]

    def sampled(self, end_ns: int) -> None:
        """Record that the tokens of the plan behind the last one are there at `end_ns`; 0 if it samples none."""
        self._tokens_ns.append(end_ns)

    def times_ns(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Return the time of `plan` on each stage, and on its way to each but the first."""
        return self._cost.stages_ns(plan), self._cost.transfers_ns(plan)
