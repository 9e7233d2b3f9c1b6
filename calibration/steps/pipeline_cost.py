"""The cost model of an engine with pipeline parallelism.

As an `OperationCost` it gives the time of a step that is alone in the pipeline: all layers, and the transfers between
stages. Each stage is also an `OperationCost`, for a model with the stage's layers; equal stages share one
`OperationCost`. Only the last stage has an LM head and a sampler. The times that a correction adds per step, row and
prompt are also on the last stage, because only its results make the CPU wait. The CPUs of the other stages run ahead of
their GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.step_operations import stage_transfer
from tokentwin.calibration.steps.correction import parts_of
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.serving.cost_model import decode_plans
from tokentwin.serving.deployments.inter_node import hops_between_nodes, of_stage
from tokentwin.serving.deployments.model_spec import stage_models
from tokentwin.serving.step_plan import StepPlan


class PipelineCost(OperationCost):
    """`PipelinedCost` of a deployment with `pipeline_parallel_size` above 1."""

    def _stages(self) -> list[OperationCost]:
        of_one = of_stage(self.deployment)
        *first, last = stage_models(self.model, self.deployment.pipeline_parallel_size)
        kernels, early, prefix = self.kernels, self.correction.of_kernels(), self.shared_prefix
        alike = {
            layers: _EarlyStage(layers, of_one, kernels, early, self.host, shared_prefix=prefix)
            for layers in dict.fromkeys(first)
        }
        end = OperationCost(last, of_one, kernels, self.correction, self.host, shared_prefix=prefix)
        return [*(alike[layers] for layers in first), end]

    @cached_property
    def _places(self) -> list[int]:
        """The index of the first equal stage, for each stage."""
        return [self.stages.index(stage) for stage in self.stages]

    def stages_ns(self, plan: StepPlan) -> list[int]:
        alike = {place: self.stages[place].step_ns(plan) for place in dict.fromkeys(self._places)}
        return [alike[place] for place in self._places]

    def waiting_ns(self, sizes: StepSizes, device_ns: Any) -> Any:
        """Return the sum of the stages' waits for their hosts; every stage has its own host."""
        return sum(stage.waiting_ns(sizes, sum(stage.own_parts(sizes).values())) for stage in self.stages)

    def step_ns(self, plan: StepPlan) -> int:
        if not self._launches(plan.tokens, plan.prefill_tokens):
            return super().step_ns(plan)
        return sum(self.stages_ns(plan)) + sum(self.transfers_ns(plan))

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        if not self._launches(rows, 0):
            return super().decode_run_ns(rows, context, squares, steps)
        return [self.cpu_ns(plan) + self.step_ns(plan) for plan in decode_plans(rows, context, squares, steps)]

    def _launches(self, tokens: int, prompt_tokens: int) -> bool:
        """Return whether the hosts launch kernels of such a step outside of CUDA graphs, which may take longer."""
        return self.host.launch_ns > 0 and (prompt_tokens > 0 or tokens > self._captured)

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        at = min(plan.tokens, self._most_tokens)
        return [self._hop_ns[across][at] for across in self._hops]

    @cached_property
    def _hops(self) -> list[bool]:
        return hops_between_nodes(self.deployment)

    @cached_property
    def _hop_ns(self) -> dict[bool, list[int]]:
        """Nanoseconds of one transfer between stages: True or False for between nodes or within one, then by tokens."""
        tokens = np.arange(self._most_tokens + 1, dtype=np.float64)
        hops_ns = {}
        for across in dict.fromkeys(self._hops):
            transfer = stage_transfer(self.model, self.deployment, tokens, across)
            hop = np.sum([ns for _, ns in parts_of(transfer, self.kernels, {})], axis=0)
            hops_ns[across] = [round(ns) for ns in (self.correction.factors["collectives"] * hop).tolist()]
        return hops_ns


class _EarlyStage(OperationCost):
    """A stage before the last one, which samples no tokens."""

    def own_parts(self, sizes: StepSizes, table: object = None) -> dict[str, NDArray[np.float64]]:
        return super().own_parts(_unsampled(sizes), table)

    def launching_ns(self, sizes: StepSizes, captured: float) -> Any:
        return super().launching_ns(_unsampled(sizes), captured)

    def logits_ps(self, changed_rows: int, scored_tokens: int) -> int:
        return 0


def _unsampled(sizes: StepSizes) -> StepSizes:
    return replace(sizes, sampled_rows=0 * sizes.sampled_rows)
