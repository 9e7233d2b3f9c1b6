"""Deployments with the cost model that prices their steps.

A calibration of our own engine holds only for that engine. A calibration of another engine, or the bundled kernel
tables, hold for every deployment that can be derived from them. A user's cost model decides itself what it holds for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokentwin.calibration.steps.external_calibration import Learnt, load_learnt
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.calibration.steps.observed import JudgedCost, observed, pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.planning.deployments import served
from tokentwin.planning.learn.watched import drift
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engine_defaults import defaults_taken, with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.kv_capacity import check_encoder, kv_capacity
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.own_cost import identity, names_own_cost, own_cost


class Priced(NamedTuple):
    """A deployment, its cost model, and the id of the calibration behind the cost model.

    The cost model counts the steps that it times. `defaults` says which settings the deployment left to its engine, and
    their values.
    """

    deployment: Deployment
    cost: JudgedCost
    calibration: str
    defaults: str = ""

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU of the kernel tables; None for our own engine, whose calibration needs no tables."""
        behind = pure(self.cost)
        return behind.kernels.gpu if isinstance(behind, OperationCost) else None

    @property
    def device(self) -> str:
        """The name under which prices list the device: the GPU's name, or `cpu` or `cuda` for our own engine."""
        return self.gpu.name if self.gpu else self.deployment.device

    def usd_per_gpu_hour(self, prices: Mapping[str, float]) -> float | None:
        """Return the price of `device` in `prices`, or else in the catalogue; None if it is in neither."""
        return prices.get(self.device, self.gpu.usd_per_hour if self.gpu else None)


def named_prices(texts: tuple[str, ...], option: str = "price") -> dict[str, float]:
    """Parse prices in dollars per GPU-hour, such as `H100=2.9`, separated by commas or blanks.

    Raises UserError that names the `option` for a text that is not a price.
    """
    prices: dict[str, float] = {}
    for pair in (pair for text in texts for pair in text.replace(",", " ").split()):
        name, _, text = pair.rpartition("=")
        if name in prices:
            raise UserError(option, pair, f"is the second price of {name}; give one")
        try:
            prices[name] = float(text)
        except ValueError:
            prices[name] = math.nan
        if not name or not 0 <= prices[name] < 1e9:
            raise UserError(option, pair, "must be GPU=DOLLARS, the price of an hour, e.g. H100=2.9")
    return prices


def priced(
    calibration: str | None, gpu: str | None, deployment: Deployment, shared_prefix: int = 0, encodes: bool = False
) -> Priced:
    """Return `deployment` with its cost model, from a calibration, a GPU, or both.

    `calibration` is a directory, or the `module:Class` of a user's cost model. All prompts start with the same
    `shared_prefix` tokens, which old releases of vLLM read once in a step. An engine that only `encodes` images needs
    no memory for the language model and its KV.

    Raises UserError when the arguments do not go together.
    """
    check_timed(calibration, gpu)
    if calibration is None:
        return _on_gpu(gpu or "", None, deployment, shared_prefix, encodes)
    if names_own_cost(calibration):
        return _by_own_model(calibration, gpu, with_kv_groups(deployment))
    learnt = calibration_in(calibration)
    if not isinstance(learnt, Calibration):
        return _on_gpu(gpu or learnt.gpu, learnt, deployment, shared_prefix, encodes)
    if gpu is not None:
        raise UserError("gpu", gpu, "cannot be combined with a calibration of our own engine; leave --gpu out")
    return _of_our_engine(learnt, with_kv_groups(deployment))


def check_timed(calibration: str | None, gpu: str | None) -> None:
    """Raise UserError if neither a calibration nor a GPU is given to time steps."""
    if calibration is None and gpu is None:
        remedy = "is missing; give --calibration, or --gpu for a GPU without a calibration"
        raise UserError("calibration", None, remedy)


def timing_gpu(calibration: str | None, gpu: str | None) -> GpuSpec | None:
    """Return the GPU whose kernel tables time the steps.

    None if our own engine's calibration or a user's cost model times them.
    """
    if calibration is None:
        return find_gpu(gpu or "")
    if names_own_cost(calibration):
        return None
    learnt = calibration_in(calibration)
    return None if isinstance(learnt, Calibration) else find_gpu(gpu or learnt.gpu)


def calibration_in(directory: str | Path) -> Calibration | Learnt:
    """Return the calibration in a directory, for our own engine or others. Raises UserError if there is none.

    The twin of a server that has changed since says so, and none of its steps counts as validated.
    """
    learnt = load_learnt(Path(directory)) or Calibration.load(directory)
    changed = drift(Path(directory))
    if not changed or isinstance(learnt, MeasuredRuns):
        return learnt
    return replace(learnt, untaught=changed[0].lower() + changed[1:])


def _by_own_model(name: str, gpu: str | None, deployment: Deployment) -> Priced:
    if gpu is not None:
        raise UserError("gpu", gpu, "cannot be combined with your own cost model; leave --gpu out")
    _check_blocks(deployment)
    return Priced(deployment, observed(own_cost(name, deployment)), identity(name))


def _check_blocks(deployment: Deployment) -> None:
    """Raise UserError if the number of KV blocks is to be derived from the memory of an unknown GPU."""
    if deployment.gpu_memory_utilization is not None:
        remedy = "cannot be used here; give scheduler.num_blocks, which the real engine prints when it starts"
        raise UserError("gpu_memory_utilization", deployment.gpu_memory_utilization, remedy)


def _on_gpu(gpu: str, learnt: Learnt | None, deployment: Deployment, shared_prefix: int, encodes: bool) -> Priced:
    from tokentwin.calibration.steps.external_calibration import (  # imports slowly: it needs scipy
        identity,
        predicted_cost,
    )

    spec = find_gpu(gpu)
    stated = {*deployment.model_fields_set, *deployment.scheduler.model_fields_set}
    if not stated & {"gpu_memory_utilization", "num_blocks"}:
        deployment = deployment.model_copy(update={"gpu_memory_utilization": served().gpu_memory_utilization})
    defaults, deployment = defaults_taken(deployment, spec), with_kv_groups(with_engine_defaults(deployment, spec))
    if encodes:
        check_encoder(find_model(deployment.model), spec, deployment)
        cost = predicted_cost(gpu, deployment, learnt)
        return Priced(
            deployment.model_copy(update={"gpu_memory_utilization": None}), observed(cost), identity(gpu, learnt)
        )
    capacity = kv_capacity(find_model(deployment.model), spec, deployment)
    if deployment.gpu_memory_utilization is None:
        capacity.check_stated(deployment.scheduler.num_blocks)
    else:
        capacity.check(deployment)
        fitted = deployment.rescheduled(num_blocks=capacity.num_blocks)
        deployment = fitted.model_copy(update={"gpu_memory_utilization": None})
    cost = predicted_cost(gpu, deployment, learnt).with_shared_prefix(shared_prefix)
    return Priced(deployment, observed(cost), identity(gpu, learnt), defaults)


def _of_our_engine(measured: Calibration, deployment: Deployment) -> Priced:
    base = measured.learnt_as
    _check_blocks(deployment)
    deployment = _as_measured(deployment, base)
    for name in Deployment.model_fields:
        if name in ("policy", "scheduler", "fleet", "kv_tiers"):
            continue
        stated, known = getattr(deployment, name), getattr(base, name)
        if name == "lora" and stated is not None and known is not None and stated.timing() == known.timing():
            continue  # the numbers of adapters change no step time
        launching = name == "enforce_eager" and stated and measured.launches.ns is not None
        if name == "engine" and stated == base.engine_name.name:
            continue  # a calibration holds for the release that was measured
        if stated != known and not launching:
            remedy = f"must be {known}, as the calibration was measured; calibrate again to change it"
            raise UserError(name, stated, remedy)
    return Priced(deployment, observed(StepCost(measured, deployment)), measured.id)


def _as_measured(deployment: Deployment, base: Deployment) -> Deployment:
    """Return `deployment` with the draft acceptance that `base` was measured with, unless `deployment` states one.

    Raises UserError for drafts of another kind, because they take a different time.
    """
    speculative, known = deployment.scheduler.speculative, base.scheduler.speculative
    if (speculative and speculative.timing()) != (known and known.timing()):
        stated = speculative and speculative.model_dump(exclude_defaults=True)
        shown = known.timing().model_dump(exclude_defaults=True) if known else "left out"
        remedy = f"must be {shown}, as the calibration was measured; calibrate again to change it"
        raise UserError("scheduler.speculative", stated, remedy)
    if speculative is None or speculative.states_acceptance:
        return deployment
    return deployment.rescheduled(speculative=known)


def base_deployment(calibration: str | None) -> Deployment:
    """Return the deployment that fills in unstated settings: the calibrated one, or without one a GPU's default."""
    if calibration is None:
        return served()
    if names_own_cost(calibration):
        return Deployment()
    learnt = calibration_in(calibration)
    known = learnt.learnt_as
    if isinstance(learnt, Calibration):  # an engine that was run here, and can run here again
        return known
    unsaid = known.model_copy(update={"engine": None})  # the user has not stated the engine that was calibrated
    return unsaid if unsaid.engine_name.name == known.engine_name.name else known
