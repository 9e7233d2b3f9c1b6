"""The interface between rung 4 and cost models, which makes the cost model for a run of a case.

The blind column has kernels of the GPU, and a correction fitted to measured runs of *other* sources.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tokentwin.calibration.steps.external_calibration import blind as blind_calibration
from tokentwin.calibration.steps.external_calibration import kernels
from tokentwin.calibration.steps.observed import JudgedCost, observed
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.validation.external.case import Case, origin_of
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.traces.measured.run import MeasuredRun


class Prediction(NamedTuple):
    """A cost model, and the estimated number of KV blocks for a case that does not state it.

    Attributes:
        request_ms: milliseconds that a server and a client add to TTFT: lower end of the 90 % interval, centre, upper
            end
    """

    cost: JudgedCost
    num_blocks: int
    request_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


Predictor = Callable[[Case, MeasuredRun, Deployment], Prediction]
"""Returns the prediction for a run of a case, by a fit that leaves out all measurements of the case's source.

Raises UserError for an unknown GPU or model.
"""


def blind(case: Case, run: MeasuredRun, deployment: Deployment) -> Prediction:
    """Return the prediction for a run; see `Predictor`.

    Also raises UserError if the engine's GPU memory is too small for it to start.
    """
    gpu = run.gpu or case.gpu
    capacity = kv_capacity(find_model(deployment.model), find_gpu(gpu), deployment)
    capacity.check(deployment)
    origin = origin_of(case, run, deployment)
    cost, request_ms = _blind(origin.source, gpu, deployment.model_dump_json(), origin.client)
    return Prediction(observed(cost), capacity.num_blocks, request_ms)


@cache
def _blind(
    source: str, gpu: str, deployment_json: str, client: str
) -> tuple[OperationCost, tuple[float, float, float]]:
    """Return the cost model and the request times of a deployment.

    They are cached, because making tables takes time and many runs have the same deployment.
    """
    deployment = Deployment.model_validate_json(deployment_json)
    known = blind_calibration(gpu, deployment, lambda origin: origin.source == source, client)
    low, high = known.request_interval
    cost = known.cost(find_model(deployment.model), deployment, kernels(gpu))
    return cost, (known.request_ms * low, known.request_ms, known.request_ms * high)
