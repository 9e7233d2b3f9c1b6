"""A cost model slowed down or sped up by a constant factor, e.g. for a throttled GPU or a pool with another speed."""

from __future__ import annotations

from collections.abc import Iterable

from serving.cost_model import CostModel, PipelinedCost
from serving.step_plan import StepPlan


class Paced:
    """A cost model with `factor` times the times of `cost`, including CPU time. Sums are rounded to nanoseconds."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self._cost = cost
        self._factor = factor

    def cpu_ns(self, plan: StepPlan) -> int:
        return round(self._cost.cpu_ns(plan) * self._factor)

    def step_ns(self, plan: StepPlan) -> int:
        cpu_ns = self._cost.cpu_ns(plan)
        return round((cpu_ns + self._cost.step_ns(plan)) * self._factor) - round(cpu_ns * self._factor)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [round(ns * self._factor) for ns in self._cost.decode_run_ns(rows, context, squares, steps)]


class PacedPipeline(Paced):
    """A paced cost model of an engine with pipeline stages. The time of each stage is rounded separately."""

    def __init__(self, cost: PipelinedCost, factor: float) -> None:
        super().__init__(cost, factor)
        self._staged = cost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return [round(ns * self._factor) for ns in self._staged.stages_ns(plan)]

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [round(ns * self._factor) for ns in self._staged.transfers_ns(plan)]


def paced(cost: CostModel, factor: float) -> CostModel:
    """Return a cost model with `factor` times the times of `cost`; `cost` itself if the factor is 1."""
    if factor == 1:
        return cost
    return PacedPipeline(cost, factor) if isinstance(cost, PipelinedCost) else Paced(cost, factor)
