"""A cost model for an engine that was never measured here, from its GPU's kernels and measurements of other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import blake2b

from calibration.kernels.catalogue import load_kernels
from calibration.kernels.collectives import COLLECTIVES
from calibration.kernels.surfaces import bundled, bundled_names
from calibration.kernels.times import KernelTimes
from calibration.steps.evidence import Evidence, Origin, bundled_bytes, bundled_evidence, own_origin
from calibration.steps.external_calibration import ExternalCalibration, of_belief, step_shares, transferred
from calibration.steps.launches import PUBLISHED, LaunchCost
from calibration.steps.measured_runs import Learnt, MeasuredRuns
from calibration.steps.operation_cost import OperationCost
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu, gpus
from serving.deployments.model_catalogue import find_model
from serving.deployments.weight_types import check_heads


def predicted_cost(
    gpu: str,
    deployment: Deployment,
    calibration: Learnt | None = None,
    launches: LaunchCost = PUBLISHED,
) -> OperationCost:
    """Return the cost model of `deployment` on `gpu`, from `calibration` or else from the bundled evidence (blind).

    Measured runs join the bundled evidence, and hold for any GPU and model. If `launches` was measured, it replaces the
    launch cost. Raises UserError for an unknown GPU or model, for heads
    that cannot be split over the devices, and for a calibration of another GPU or model.
    """
    model = find_model(deployment.model)
    check_heads(model, deployment.tensor_parallel_size)
    if isinstance(calibration, MeasuredRuns):
        known = blind(gpu, deployment, evidence=calibration.evidence)
    else:
        known = blind(gpu, deployment)
    if isinstance(calibration, ExternalCalibration):
        then = calibration.learnt_as
        same = find_gpu(gpu).name == calibration.gpu and then.model == deployment.model
        there = blind(gpu, then) if same else known
        known = transferred(calibration, find_gpu(gpu), deployment, known, there)
    if launches.ns is not None and launches is not PUBLISHED:
        known = replace(known, host=replace(known.host, launches=launches))
    return known.cost(model, deployment, kernels(gpu))


def identity(gpu: str, calibration: Learnt | None = None) -> str:
    """Return a hash of everything that a prediction depends on, as twelve hexadecimal digits.

    It covers the calibration, the evidence, the kernel tables, and the datasheet of a user's own GPU.
    """
    digest = blake2b((calibration.id if calibration else "").encode() + bundled_bytes(), digest_size=6)
    spec = find_gpu(gpu)
    if spec != gpus().get(spec.name):
        digest.update(spec.model_dump_json().encode())
    own = bundled(spec.name)
    for path in [COLLECTIVES, *([own] if own.exists() else map(bundled, bundled_names()))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def kernels(gpu: str) -> KernelTimes:
    """Return the kernel times of a GPU, given by its name or its file; they are read only once."""
    return load_kernels(find_gpu(gpu))


def blind(
    gpu: str,
    deployment: Deployment,
    without: Callable[[Origin], bool] | None = None,
    client: str = "",
    evidence: Evidence | None = None,
) -> ExternalCalibration:
    """Return the calibration of `deployment` on `gpu` from measured runs of other engines.

    Evidence from origins for which `without` returns True is left out. `evidence` is the bundled evidence by default.
    """
    model, spec = find_model(deployment.model), find_gpu(gpu)
    known = evidence or bundled_evidence()
    origin = own_origin(Origin.from_deployment(model, spec, deployment, client=client))
    left = known if without is None else known.without(without)
    calibration = of_belief(left, origin, deployment, spec, step_shares(model, deployment, kernels(gpu)))
    if spec.name in gpus():
        return calibration
    return replace(calibration, untaught=f"the catalogue lacks {spec.name}, so no measured run taught it")
