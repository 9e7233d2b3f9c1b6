"""Cost models with one constraint lifted: a wrapper each, exact in leaps as their originals are.

They answer what a step would take if prompts were free, if the CPU took no time, or if memory were twice as fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from calibration.kernels.times import Estimate, KernelTimes, floor_ns
from calibration.operations import Operation
from calibration.steps.observed import pure
from calibration.steps.operation_cost import OperationCost
from calibration.steps.step_cost import StepCost
from serving.cost_model import CostModel, PipelinedCost, decode_plans
from serving.deployments.config import Deployment
from serving.step_plan import StepPlan

_KV_PRICES = ("decode_context", "prefill_context")


class FreePrefill:
    """A step costs what its decode rows alone would; one that only has prompts takes no time."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cost.cpu_ns(_without_prompts(plan)) if plan.decode_rows else 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._cost.step_ns(_without_prompts(plan)) if plan.decode_rows else 0

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return self._cost.decode_run_ns(rows, context, squares, steps)


class FreePrefillOfStages(FreePrefill):
    """The same on every pipeline stage."""

    _cost: PipelinedCost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        stages_ns = self._cost.stages_ns(_without_prompts(plan))
        return stages_ns if plan.decode_rows else [0] * len(stages_ns)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        transfers = self._cost.transfers_ns(_without_prompts(plan))
        return transfers if plan.decode_rows else [0] * len(transfers)


class NoCpuTime:
    """Planning, and whatever else the CPU does between steps, takes no time."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._cost.step_ns(plan)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        whole = self._cost.decode_run_ns(rows, context, squares, steps)
        plans = decode_plans(rows, context, squares, steps)
        return [ns - self._cost.cpu_ns(plan) for ns, plan in zip(whole, plans, strict=True)]


class NoCpuTimeOfStages(NoCpuTime):
    """The same before a pipeline, whose stages stay as they are."""

    _cost: PipelinedCost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return self._cost.stages_ns(plan)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return self._cost.transfers_ns(plan)


def with_free_prefill(cost: CostModel) -> CostModel:
    """`cost` with prompts that cost nothing, and pipeline stages if it has any."""
    return FreePrefillOfStages(cost) if isinstance(cost, PipelinedCost) else FreePrefill(cost)


def without_cpu_time(cost: CostModel) -> CostModel:
    """`cost` with no CPU time between steps, and pipeline stages if it has any."""
    return NoCpuTimeOfStages(cost) if isinstance(cost, PipelinedCost) else NoCpuTime(cost)


class TwiceTheBandwidth:
    """`KernelTimes` of a GPU with twice the memory bandwidth: every kernel stays as far from its roofline as it was."""

    def __init__(self, kernels: KernelTimes) -> None:
        self._kernels = kernels
        rate = 2 * kernels.gpu.memory_bytes_per_s
        self.gpu = kernels.gpu.model_copy(update={"memory_bytes_per_s": rate})

    def time(self, operation: Operation) -> Estimate:
        estimate = self._kernels.time(operation)
        before: Any = floor_ns(self._kernels.gpu, operation)
        return estimate._replace(ns=estimate.ns * _ratio(floor_ns(self.gpu, operation), before))


def twice_the_bandwidth(cost: CostModel) -> CostModel | None:
    """`cost` with twice the memory bandwidth; None where a cost model cannot tell what memory has to do with it.

    A calibration of our own engine tells what reading KV costs and not what reading weights does, so that there only
    KV is read twice as fast.
    """
    behind = pure(cost)
    if isinstance(behind, OperationCost):
        return _operations(behind, behind.deployment, TwiceTheBandwidth(behind.kernels))
    if isinstance(behind, StepCost):
        prices = dict(behind.calibration.step_prices_ps)
        prices.update({name: prices[name] // 2 for name in _KV_PRICES})
        return StepCost(replace(behind.calibration, step_prices_ps=prices))
    return None


def repriced(cost: CostModel, deployment: Deployment) -> CostModel:
    """`cost` for other scheduler settings, whose sizes the tables of a model of operations must reach."""
    behind = pure(cost)
    return _operations(behind, deployment, behind.kernels) if isinstance(behind, OperationCost) else cost


def _operations(cost: OperationCost, deployment: Deployment, kernels: KernelTimes) -> OperationCost:
    return type(cost)(cost.model, deployment, kernels, cost.correction, cost.host, cost.known_interval)


def _without_prompts(plan: StepPlan) -> StepPlan:
    left = StepPlan(plan.seq, plan.decodes, plan.lag)
    left.add_decodes(plan.decode_rows, plan.decode_context, plan.decode_squares)
    left.draft_tokens, left.draft_pairs = plan.draft_tokens, plan.draft_pairs
    left.masked_rows = plan.masked_rows
    return left


def _ratio(after: Any, before: Any) -> Any:
    """1 where there is nothing to do."""
    return np.divide(after, before, out=np.ones_like(np.asarray(before, dtype=np.float64)), where=before > 0)
