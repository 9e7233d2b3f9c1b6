"""The cost model of an engine whose layers are on several pipeline stages.

As an `OperationCost` it prices a step with the pipeline to itself: all layers, and the transfers between stages. Each
stage is one again, of a model with that stage's layers; stages that are alike share theirs. Only the last has a head
and a sampler. It also has what a correction adds by step, row and prompt, as it is the one whose results the CPU waits
for: the others' CPUs run ahead of their GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from calibration.kernels.times import KernelTimes
from calibration.operations import StepSizes, stage_transfers
from calibration.steps.correction import ADDED, Correction
from calibration.steps.interval import SURE, StepInterval
from calibration.steps.operation_cost import HostTimes, OperationCost
from calibration.steps.parts import parts_of
from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec
from serving.deployments.pipeline_stages import stage_models
from serving.step_plan import StepPlan


class PipelineCost(OperationCost):
    """`PipelinedCost` of a deployment with `pipeline_parallel_size` above 1."""

    def __init__(
        self,
        model: ModelSpec,
        deployment: Deployment,
        kernels: KernelTimes,
        correction: Correction | None = None,
        host: HostTimes | None = None,
        interval: StepInterval = SURE,
    ) -> None:
        super().__init__(model, deployment, kernels, correction, host, interval)
        of_one = deployment.model_copy(update={"pipeline_parallel_size": 1})
        early = replace(self.correction, added_ns=dict.fromkeys(ADDED, 0.0))

        @cache
        def early_stage(layers: ModelSpec) -> OperationCost:
            return _EarlyStage(layers, of_one, kernels, early)

        *first, last = stage_models(model, deployment.pipeline_parallel_size)
        self.stages = [*map(early_stage, first), OperationCost(last, of_one, kernels, self.correction)]
        self._places = [self.stages.index(stage) for stage in self.stages]
        self._transfer_ns = self._tabulate_transfers()

    def stages_ns(self, plan: StepPlan) -> list[int]:
        alike = {place: self.stages[place].step_ns(plan) for place in dict.fromkeys(self._places)}
        return [alike[place] for place in self._places]

    def transfer_ns(self, plan: StepPlan) -> int:
        return self._transfer_ns[min(plan.tokens, self._most_tokens)]

    def _tabulate_transfers(self) -> list[int]:
        """Of one hop, by tokens."""
        tokens = np.arange(self._most_tokens + 1, dtype=np.float64)
        transfers = stage_transfers(self.model, self.deployment, tokens)
        hops = sum((estimate.ns for _, estimate in parts_of(transfers, self.kernels)), np.zeros_like(tokens))
        factor = self.correction.factors["collectives"] / (self.deployment.pipeline_parallel_size - 1)
        return [round(ns) for ns in (factor * hops).tolist()]


class _EarlyStage(OperationCost):
    """A stage before the last: nothing is sampled on it."""

    def own_parts(self, sizes: StepSizes) -> dict[str, NDArray[np.float64]]:
        return super().own_parts(replace(sizes, sampled_rows=0 * sizes.sampled_rows))
