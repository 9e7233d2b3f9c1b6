"""The seam between rung 4 and whatever prices a step: a case, a GPU and a deployment in, a cost model out.

The blind column has kernels of the GPU, and what measured runs of *other* sources taught.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from calibration.steps.observed import JudgedCost, observed
from calibration.steps.operation_cost import OperationCost
from calibration.steps.predict import blind as bundled
from calibration.steps.predict import predicted_cost
from calibration.validation.external.case import Case, source_of
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model


class Prediction(NamedTuple):
    """A new cost model, and the KV blocks that the engine would have where a case does not state them.

    client_ms   what a client adds to TTFT at most, 9 times out of 10
    """

    cost: JudgedCost
    num_blocks: int
    client_ms: float = 0.0


Predictor = Callable[[Case, str, Deployment], Prediction]
"""Prices steps of engines that were never measured here: a case, for leaving out what its own runs taught, and a GPU.

Raises UserError for an unknown GPU or model.
"""


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
