"""Cost models with one constraint lifted; like the originals, they time runs of many decode steps exactly.

They give the time of a step if prompts were free, if the CPU took no time, if pipeline stages never waited, or if a
part of a step took no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import StepCost
from tokentwin.serving.adapter_times import adapter_times
from tokentwin.serving.cost_model import CostModel, NetworkedCost, PipelinedCost, decode_plans
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.encoder_times import encoder_times
from tokentwin.serving.step_plan import StepPlan

_KV_PRICES = ("decode_context", "prefill_context")
KV_PARTS = ("decode attention", "imbalance", "past attention")
WEIGHT_PARTS = ("weights", "experts")


class _Lifted:
    """A lifted cost model. Known times of the network between nodes, of adapters and of the encoder stay."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.adapters = adapter_times(cost)
        self.encoder = encoder_times(cost)

    def network_ns(self, tokens: int) -> int:
        return self._cost.network_ns(tokens) if isinstance(self._cost, NetworkedCost) else 0


class FreePrefill(_Lifted):
    """A step takes the time of its decode rows alone; a step with only prompts takes no time."""

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cost.cpu_ns(_without_prompts(plan)) if plan.decode_rows else 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._cost.step_ns(_without_prompts(plan)) if plan.decode_rows else 0

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return self._cost.decode_run_ns(rows, context, squares, steps)


class FreePrefillOfStages(FreePrefill):
    """Free prefill on every pipeline stage."""

    _cost: PipelinedCost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        stages_ns = self._cost.stages_ns(_without_prompts(plan))
        return stages_ns if plan.decode_rows else [0] * len(stages_ns)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        transfers = self._cost.transfers_ns(_without_prompts(plan))
        return transfers if plan.decode_rows else [0] * len(transfers)


class NoCpuTime(_Lifted):
    """Planning and other CPU work between steps take no time."""

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._cost.step_ns(plan)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        whole = self._cost.decode_run_ns(rows, context, squares, steps)
        plans = decode_plans(rows, context, squares, steps)
        return [ns - self._cost.cpu_ns(plan) for ns, plan in zip(whole, plans, strict=True)]


class NoCpuTimeOfStages(NoCpuTime):
    """A pipeline without CPU time before its first stage; the times of the stages stay as they are."""

    _cost: PipelinedCost

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return self._cost.stages_ns(plan)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return self._cost.transfers_ns(plan)


class StagesAtOnce:
    """All pipeline stages work on each step at the same time, and send nothing: the same work without bubbles."""

    def __init__(self, cost: PipelinedCost) -> None:
        self._cost = cost

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cost.cpu_ns(plan)

    def step_ns(self, plan: StepPlan) -> int:
        stages_ns = self._cost.stages_ns(plan)
        return sum(stages_ns) // len(stages_ns)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [self.cpu_ns(plan) + self.step_ns(plan) for plan in decode_plans(rows, context, squares, steps)]


def with_free_prefill(cost: CostModel) -> CostModel:
    """Return `cost` with free prompts; if `cost` has pipeline stages, so has the result."""
    return FreePrefillOfStages(cost) if isinstance(cost, PipelinedCost) else FreePrefill(cost)


def without_cpu_time(cost: CostModel) -> CostModel:
    """Return `cost` without CPU time between steps; if `cost` has pipeline stages, so has the result."""
    return NoCpuTimeOfStages(cost) if isinstance(cost, PipelinedCost) else NoCpuTime(cost)


def with_parts(cost: CostModel, times: float, *parts: str) -> CostModel | None:
    """Return `cost` with the time of some of `tokentwin.calibration.steps.correction` multiplied by `times`.

    Returns None if the cost model has no separate parts.
    """
    behind = pure(cost)
    if not isinstance(behind, OperationCost):
        return None
    factors = dict(behind.correction.factors)
    factors |= {part: times * factors[part] for part in parts}
    return _remade(behind, behind.deployment, correction=replace(behind.correction, factors=factors))


def with_half_the_kv(cost: CostModel) -> CostModel | None:
    """Return `cost` with attention to cached KV twice as fast; None if the cost model does not time it separately."""
    behind = pure(cost)
    if isinstance(behind, StepCost):
        prices = dict(behind.calibration.step_prices_ps)
        prices.update({name: prices[name] // 2 for name in _KV_PRICES})
        surfaces = behind.calibration.surfaces
        halved = surfaces and surfaces.with_parts(0.5, *KV_PARTS)
        return behind.priced_by(replace(behind.calibration, step_prices_ps=prices, surfaces=halved))
    return with_parts(cost, 0.5, *KV_PARTS)


def without_launches(cost: CostModel) -> CostModel | None:
    """Return `cost` without the fixed time of every step: launches of kernels and graphs, and gaps; None if unknown."""
    behind = pure(cost)
    if isinstance(behind, StepCost) and behind.launching:
        return StepCost(behind.calibration)
    if not isinstance(behind, OperationCost):
        return None
    correction = replace(behind.correction, added_ns={**behind.correction.added_ns, "step": 0.0})
    host = replace(behind.host, launches=behind.host.launches.scaled(0.0))
    return _remade(behind, behind.deployment, correction=correction, host=host)


def repriced(cost: CostModel, deployment: Deployment) -> CostModel:
    """Return `cost` for another deployment with the same kernels; unchanged if it is not made of operations.

    Raises UserError if the model cannot be split as the deployment asks.
    """
    behind = pure(cost)
    return _remade(behind, deployment) if isinstance(behind, OperationCost) else cost


def _remade(cost: OperationCost, deployment: Deployment, **changes: Any) -> OperationCost:
    own: dict[str, Any] = {"correction": cost.correction, "host": cost.host, "interval": cost.known_interval}
    own["shared_prefix"] = cost.shared_prefix
    return type(cost)(cost.model, deployment, cost.kernels, **own | changes)


def _without_prompts(plan: StepPlan) -> StepPlan:
    left = StepPlan(plan.seq, plan.decodes, plan.lag)
    left.add_decodes(plan.decode_rows, plan.decode_context, plan.decode_squares)
    left.draft_tokens, left.draft_pairs = plan.draft_tokens, plan.draft_pairs
    left.masked_rows, left.changed_rows = plan.masked_rows, plan.changed_rows
    return left
