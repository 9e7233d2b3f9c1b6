"""A cost model for an engine that was never measured here: kernels of its GPU, and what other engines taught."""

from __future__ import annotations

import json
from functools import cache
from hashlib import blake2b
from importlib.resources import files

from calibration.kernels.catalogue import load_kernels
from calibration.kernels.collectives import COLLECTIVES
from calibration.kernels.surfaces import bundled, bundled_names
from calibration.kernels.times import KernelTimes
from calibration.steps.external_calibration import ExternalCalibration
from calibration.steps.operation_cost import OperationCost
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.model_catalogue import find_model


def predicted_cost(gpu: str, deployment: Deployment, calibration: ExternalCalibration | None = None) -> OperationCost:
    """The cost model of `deployment` on `gpu`, by `calibration` or, blind, by what is bundled.

    Raises UserError for a GPU or a model that is not known.
    """
    known = calibration or blind()
    return known.cost(find_model(deployment.model), deployment, kernels(gpu))


def identity(gpu: str, calibration: ExternalCalibration | None = None) -> str:
    """Twelve hexadecimal digits that change when the calibration does, or the kernel tables behind it."""
    digest = blake2b((calibration or blind()).id.encode(), digest_size=6)
    own = bundled(find_gpu(gpu).name)
    for path in [COLLECTIVES, *([own] if own.exists() else map(bundled, bundled_names()))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def kernels(gpu: str) -> KernelTimes:
    """Kernel times of a catalogued GPU, read once."""
    return load_kernels(find_gpu(gpu))


def blind(without: str = "") -> ExternalCalibration:
    """The bundled calibration for engines that nothing is known of; its file says what it was learnt from.

    `without` names a source (a case and a model of `calibration.validation.external`) that must have taught it nothing.
    """
    known = _blind()
    return known.get(without, known[""])


@cache
def _blind() -> dict[str, ExternalCalibration]:
    data = json.loads(files("calibration.steps").joinpath("blind.json").read_text(encoding="utf-8"))
    return {name: ExternalCalibration.read(entry, f"blind.json {name}") for name, entry in data.items()}
