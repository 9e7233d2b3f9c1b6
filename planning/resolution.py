"""Where the settings of a deployment are decided: those that are stated, and those that follow from them.

A setting that is not stated is that of the calibration, or of the default deployment on a GPU. Then the engine's
defaults on the GPU fill in the limits of the scheduler, the model gives the groups of its KV blocks, and the memory
gives their number. A resolved deployment states all of these, so it resolves to itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tokentwin.calibration.steps.external_calibration import Learnt, load_learnt
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.planning.deployments import served
from tokentwin.planning.learn.watched import drift
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, merged, over, parse, pool_deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.kv_capacity import UTILIZATION, check_encoder, kv_capacity
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import check_own_setting
from tokentwin.serving.user_code.own_cost import names_own_cost


def resolved(deployment: Deployment, gpu: GpuSpec | None, encodes: bool = False) -> tuple[Deployment, str]:
    """Return one engine with all settings decided for `gpu`; None: our own engine, or a user's cost model.

    The text lists its engine's defaults; it is empty if there are none. An engine that only `encodes` images needs no
    memory for the language model and its KV. Raises UserError for settings that do not go together, or that do not fit
    into the memory.
    """
    check_own_setting(deployment.policy, deployment.scheduler)
    memory = deployment.gpu_memory_utilization
    if gpu is None:
        if memory is not None:
            remedy = "cannot be used here; give scheduler.num_blocks, which the real engine prints when it starts"
            raise UserError("gpu_memory_utilization", memory, remedy)
        return with_kv_groups(deployment), ""
    if not deployment.states("gpu_memory_utilization") and not deployment.scheduler.states("num_blocks"):
        memory = UTILIZATION
    sized = deployment.model_copy(update={"gpu_memory_utilization": memory})
    sized, defaults = with_engine_defaults(sized, gpu)
    sized, model = with_kv_groups(sized), find_model(sized.model)
    if encodes:
        check_encoder(model, gpu, sized)
        return sized.model_copy(update={"gpu_memory_utilization": None}), ""
    capacity = kv_capacity(model, gpu, sized)
    if memory is None:
        capacity.check_stated(sized.scheduler.num_blocks)
    else:
        capacity.check(sized)
        fitted = sized.rescheduled(num_blocks=capacity.num_blocks)
        sized = fitted.model_copy(update={"gpu_memory_utilization": None})
    return sized, defaults


def resolved_fleet(
    deployment: Deployment, calibration: str | None, gpu: str | None
) -> tuple[Deployment, tuple[str, ...]]:
    """Return `deployment` and all pools of its fleet resolved, and a line with the defaults of each engine.

    `calibration` or `gpu` times the steps of pools that name neither. Raises UserError as `resolved` does, and for a
    GPU or a calibration that does not exist.
    """
    base, defaults = resolved(deployment.model_copy(update={"fleet": None}), timing_gpu(calibration, gpu))
    lines = [defaults]
    if deployment.fleet is None:
        return base, tuple(filter(None, lines))
    pools = []
    for pool in deployment.fleet.pools:
        shared = gpu if pool.calibration is None else None
        timed_by = timing_gpu(pool.calibration or calibration, pool.gpu or shared)
        own, defaults = resolved(pool_deployment(deployment, pool), timed_by, pool.role == "encode")
        lines.append(defaults)
        stated = pool.deployment.get("scheduler") or {}
        changed = _changed(base.scheduler, own.scheduler, stated)
        settings = merged(pool.deployment, {"scheduler": changed}) if changed else pool.deployment
        pools.append(pool.model_copy(update={"deployment": settings}))
    fleet = deployment.fleet.model_copy(update={"pools": tuple(pools)})
    return base.model_copy(update={"fleet": fleet}), tuple(dict.fromkeys(filter(None, lines)))


def _changed(base: SchedulerConfig, own: SchedulerConfig, stated: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `own` that `base` has otherwise, or that are `stated`, as plain data."""
    pairs = ((name, getattr(own, name)) for name in SchedulerConfig.model_fields)
    changed = {name: value for name, value in pairs if name in stated or value != getattr(base, name)}
    return {n: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for n, v in changed.items()}


def base_deployment(calibration: str | None, *gpus: str | None) -> Deployment:
    """Return the deployment that supplies what is not stated: the calibrated one, or without one a GPU's default.

    If one of `gpus` is not the GPU that was calibrated, KV blocks follow from its memory.
    """
    if calibration is None:
        return served()
    if names_own_cost(calibration):
        return Deployment()
    learnt = calibration_in(calibration)
    known = learnt.learnt_as
    if isinstance(learnt, Calibration):  # an engine that was run here, and can run here again
        return known
    if any(gpu is not None and find_gpu(gpu) != find_gpu(learnt.gpu) for gpu in gpus):
        memory = {"gpu_memory_utilization": known.gpu_memory_utilization or UTILIZATION}
        known = parse(Deployment, over(known.as_stated(), memory), where="calibration.deployment")
    unsaid = known.model_copy(update={"engine": None})  # the user has not stated the engine that was calibrated
    return unsaid if unsaid.engine_name.name == known.engine_name.name else known


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
