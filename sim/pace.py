"""A cost model made slower or faster by a constant factor: a throttled GPU, or one known only by comparison."""

from __future__ import annotations

from collections.abc import Iterable

from serving.cost_model import CostModel
from serving.step_plan import StepPlan


class Paced:
    """`cost` with all of a step, CPU time included, `factor` times as long; sums are rounded to the nanosecond."""

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


def paced(cost: CostModel, factor: float) -> CostModel:
    """`cost` itself where the factor is 1."""
    return cost if factor == 1 else Paced(cost, factor)
