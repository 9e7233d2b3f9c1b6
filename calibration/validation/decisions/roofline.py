"""A baseline: every operation as fast as the datasheet allows, and no time between them, in the same simulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from calibration.kernels.times import Coverage, Estimate, floor_ns
from calibration.operations import Operation
from calibration.steps.correction import Correction
from calibration.steps.observed import observed
from calibration.steps.operation_cost import HostTimes, OperationCost
from calibration.validation.external.case import Case
from calibration.validation.external.predictor import Prediction
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec, find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model


@dataclass
class Roofline:
    """`KernelTimes` of a datasheet."""

    gpu: GpuSpec

    def time(self, operation: Operation) -> Estimate:
        return Estimate(floor_ns(self.gpu, operation), 0.0, Coverage.EXTRAPOLATED)


def roofline(case: Case, gpu: str, deployment: Deployment) -> Prediction:
    """A `Predictor` that has seen no measurement."""
    blocks = kv_capacity(find_model(deployment.model), find_gpu(gpu), deployment).num_blocks
    return Prediction(observed(_cost(gpu, deployment.model_dump_json())), blocks)


@cache
def _cost(gpu: str, deployment_json: str) -> OperationCost:
    deployment = Deployment.model_validate_json(deployment_json)
    model, times = find_model(deployment.model), Roofline(find_gpu(gpu))
    return OperationCost(model, deployment, times, Correction(), HostTimes())
