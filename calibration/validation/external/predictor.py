"""The interface between rung 4 and cost models: it turns a case, a GPU and a deployment into a cost model.

The blind column has kernels of the GPU, and lessons from measured runs of *other* sources.

A case with an anchor becomes a calibration file: the correction from one measured run, kept for simulations. The
anchor's factor on decode steps multiplies the time of steps without prompts, and its factor on prompts the time that
prompts add. Milliseconds outside the engine are left out: a simulation has no client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import log, sqrt
from typing import Any, NamedTuple

from calibration.steps.external_calibration import ExternalCalibration
from calibration.steps.interval import REACH, factors_of
from calibration.steps.observed import JudgedCost, observed
from calibration.steps.operation_cost import OperationCost
from calibration.steps.predict import blind as blind_calibration
from calibration.steps.predict import kernels
from calibration.validation.external.case import Case, origin_of
from calibration.validation.external.scoring import CaseResult
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError
from traces.measured.run import MeasuredRun


class Prediction(NamedTuple):
    """A new cost model, and the engine's KV blocks for a case that does not state them.

    Attributes:
        request_ms: time that a server and a client add to TTFT: centre between the ends of a 90 % interval
    """

    cost: JudgedCost
    num_blocks: int
    request_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


Predictor = Callable[[Case, MeasuredRun, Deployment], Prediction]
"""Prices steps of engines that were never measured here: a run of a case, so that what such runs taught is left out.

Raises UserError for an unknown GPU or model.
"""


def blind(case: Case, run: MeasuredRun, deployment: Deployment) -> Prediction:
    """Return the prediction for a run; see `Predictor`.

    Raises UserError also if the engine could not have started for want of memory.
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
    """Return cost model and request times of a deployment.

    They are cached, because tables take time to make, and many runs have the same deployment.
    """
    deployment = Deployment.model_validate_json(deployment_json)
    known = blind_calibration(gpu, deployment, lambda origin: origin.source == source, client)
    low, high = known.request_interval
    cost = known.cost(find_model(deployment.model), deployment, kernels(gpu))
    return cost, (known.request_ms * low, known.request_ms, known.request_ms * high)


_FIGURES = ("tpot_ms.mean", "e2e_ms.mean")
_LEAST = 0.02  # no single run teaches better than this


def learnt_from(result: CaseResult, created: str) -> ExternalCalibration:
    """Return the calibration of the engine of a scored case; raise UserError if the case has no anchor."""
    case, correction = result.case, result.correction
    if case.anchor is None or correction is None:
        remedy = "is missing; name the run to learn from, and the figures to reproduce"
        raise UserError(f"{case.name}.anchor", None, remedy)
    deployment, _ = case.deployment_of(result.runs[0])
    gpu = result.runs[0].gpu or case.gpu
    start = blind_calibration(gpu, deployment)
    return replace(
        start,
        gpu=find_gpu(gpu).name,
        deployment=deployment.model_dump_json(),
        correction=replace(
            start.correction.scaled(correction.decode, correction.prefill), source=f"{case.name}, run {case.anchor.run}"
        ),
        host=start.host.scaled(correction.decode),
        **_intervals(result),
        source=f"{case.title}, run {case.anchor.run}; before that {start.source}",
        created=created,
    )


def _intervals(result: CaseResult) -> dict[str, Any]:
    """Return intervals from the errors of the anchored column on the other runs; nothing if there are none."""
    errors = [row.error_pct("anchored") for row in result.rows if row.figure in _FIGURES]
    logs = [log(1 + error / 100) for error in errors if error is not None and error > -100]
    if not logs:
        return {}
    reach = REACH * max(sqrt(sum(x * x for x in logs) / len(logs)), _LEAST)
    return {"interval": factors_of(reach), "prompt_interval": None}
