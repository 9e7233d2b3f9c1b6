"""Which deployment a verb simulates, and what prices its steps.

A calibration of our own engine holds for that engine alone; one of another engine, and the bundled kernels, for
whatever can be derived from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokentwin.deployments import read_deployment

if TYPE_CHECKING:
    from calibration.operation_cost import OperationCost
    from calibration.step_cost import StepCost
    from serving.config import Deployment
    from serving.gpu_spec import GpuSpec


class Priced(NamedTuple):
    """A deployment, its cost model, and the id of the calibration behind it."""

    deployment: Deployment
    cost: StepCost | OperationCost
    calibration: str

    @property
    def gpu(self) -> GpuSpec | None:
        """What its kernels run on; None for our own engine, timed where it was measured."""
        from calibration.operation_cost import OperationCost

        return self.cost.kernels.gpu if isinstance(self.cost, OperationCost) else None

    @property
    def device(self) -> str:
        """By which name its price is known: the GPU's, or `cpu` or `cuda` for our own engine."""
        return self.gpu.name if self.gpu else self.deployment.device

    def usd_per_gpu_hour(self, prices: Mapping[str, float]) -> float | None:
        """The price of its `device` in `prices`, or else in the catalogue; None if it is in neither."""
        return prices.get(self.device, self.gpu.usd_per_hour if self.gpu else None)


def named_prices(texts: tuple[str, ...]) -> dict[str, float]:
    """Dollars per GPU-hour from `H100=2.9`, one by one or between commas. Raises UserError for what is no price."""
    from serving.errors import UserError

    prices: dict[str, float] = {}
    for pair in (pair for text in texts for pair in text.replace(",", " ").split()):
        name, _, text = pair.rpartition("=")
        try:
            prices[name] = float(text)
        except ValueError:
            prices[name] = math.nan
        if not name or not 0 <= prices[name] < 1e9:
            raise UserError("price", pair, "should be GPU=DOLLARS an hour, e.g. H100=2.9")
    return prices


def priced_deployment(
    calibration: str | None, gpu: str | None, deployment_file: str | None, flags: dict[str, Any]
) -> Priced:
    """From the options of a command; see `priced`."""
    return priced(calibration, gpu, lambda base: read_deployment(deployment_file, flags, base))


def priced(calibration: str | None, gpu: str | None, settle: Callable[[Deployment], Deployment]) -> Priced:
    """From a calibration (a directory), or a GPU alone; `settle` makes the deployment from the one it was learnt with.

    Raises UserError when they do not go together.
    """
    from calibration.engine_calibration import FILE, EngineCalibration
    from serving.errors import UserError

    if calibration is None:
        if gpu is None:
            raise UserError(
                "calibration", "none", "give --calibration, or --gpu to simulate a GPU that was not measured"
            )
        return _on_gpu(gpu, None, settle(_served("Llama-3.1-8B")))
    if (Path(calibration) / FILE).exists():
        learnt = EngineCalibration.load(Path(calibration) / FILE)
        return _on_gpu(gpu or learnt.gpu, learnt, settle(_parsed(learnt.deployment)))
    if gpu is not None:
        raise UserError("gpu", gpu, "goes with kernel tables; this calibration is of our own engine, leave --gpu out")
    return _of_our_engine(calibration, settle)


def _on_gpu(gpu: str, learnt: Any, deployment: Deployment) -> Priced:
    from calibration.predict import identity, predicted_cost
    from serving.gpu_spec import find_gpu
    from serving.kv_capacity import kv_capacity
    from serving.model_catalogue import find_model

    if deployment.gpu_memory_utilization is not None:
        capacity = kv_capacity(find_model(deployment.model), find_gpu(gpu), deployment)
        capacity.check(deployment)
        scheduler = deployment.scheduler.model_copy(update={"num_blocks": capacity.num_blocks})
        deployment = deployment.model_copy(update={"scheduler": scheduler, "gpu_memory_utilization": None})
    return Priced(deployment, predicted_cost(gpu, deployment, learnt), identity(gpu, learnt))


def _of_our_engine(calibration: str, settle: Callable[[Deployment], Deployment]) -> Priced:
    from calibration.step_cost import Calibration, StepCost
    from serving.config import Deployment
    from serving.errors import UserError

    measured = Calibration.load(calibration)
    base = _parsed(measured.deployment)
    deployment = settle(base)
    if deployment.gpu_memory_utilization is not None:
        raise UserError(
            "gpu_memory_utilization",
            deployment.gpu_memory_utilization,
            "is for the real engine, which prints the num_blocks it found; give scheduler.num_blocks",
        )
    if deployment.scheduler.speculative is not None:
        raise UserError(
            "scheduler.speculative",
            deployment.scheduler.speculative.method,
            "has no price in a calibration of our own engine, which does not speculate; give --gpu instead",
        )
    for name in Deployment.model_fields:
        if name in ("policy", "scheduler", "fleet", "kv_tiers"):
            continue
        asked, known = getattr(deployment, name), getattr(base, name)
        if asked != known:
            raise UserError(name, asked, f"this calibration was measured with {known}; calibrate for the other first")
    return Priced(deployment, StepCost(measured), measured.id)


def _served(model: str) -> Deployment:
    from serving.config import Deployment

    return Deployment(model=model, device="cuda", gpu_memory_utilization=0.9)


def _parsed(deployment: str) -> Deployment:
    from serving.config import Deployment, parse

    return parse(Deployment, json.loads(deployment), where="calibration.deployment")
