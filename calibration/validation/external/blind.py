"""The predictor of the blind column: kernels of the GPU, and what measured runs of *other* sources taught."""

from __future__ import annotations

from functools import cache

from calibration.steps.observed import observed
from calibration.steps.operation_cost import OperationCost
from calibration.steps.predict import blind as bundled
from calibration.steps.predict import predicted_cost
from calibration.validation.external.case import Case
from calibration.validation.external.predictor import Prediction
from calibration.validation.external.teaching import source_of
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model


def blind(case: Case, gpu: str, deployment: Deployment) -> Prediction:
    """See `Predictor`. Raises UserError, too, when the engine could not have started for want of memory."""
    source = source_of(case, deployment)
    capacity = kv_capacity(find_model(deployment.model), find_gpu(gpu), deployment)
    capacity.check(deployment)
    cost = observed(_blind(source, gpu, deployment.model_dump_json()))
    return Prediction(cost, capacity.num_blocks, bundled(without=source).client_ms)


@cache
def _blind(source: str, gpu: str, deployment_json: str) -> OperationCost:
    """Tables take time to make, and many runs are of one deployment."""
    return predicted_cost(gpu, Deployment.model_validate_json(deployment_json), bundled(without=source))
