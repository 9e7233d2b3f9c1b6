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
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, merged, parse, pool_deployment
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.kv_capacity import UTILIZATION, check_encoder, kv_capacity
from tokentwin.serving.deployments.kv_layout import with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import check_own_setting
from tokentwin.serving.user_code.own_cost import names_own_cost

_OF_ONE_MEMORY: Any = {"quantization": True, "scheduler": {"num_blocks"}}
_SIZED_BY = (
    "model", "dtype", "quantization", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
)  # fmt: skip


def resolved(
    deployment: Deployment, gpu: GpuSpec | None, learnt: Learnt | None = None, encodes: bool = False
) -> tuple[Deployment, str]:
    """Return one engine with all settings decided for `gpu`; None: our own engine, or a user's cost model.

    The text lists its engine's defaults; it is empty if there are none. An engine that only `encodes` images needs no
    memory for the language model and its KV. Raises UserError for settings that do not go together, or that do not fit
    into the memory.
    """
    check_own_setting(deployment.policy, deployment.scheduler)
    if gpu is None:
        if (memory := deployment.gpu_memory_utilization) is not None:
            remedy = "cannot be used here; give scheduler.num_blocks, which the real engine prints when it starts"
            raise UserError("gpu_memory_utilization", memory, remedy)
        return with_kv_groups(deployment), ""
    sized, defaults = with_engine_defaults(as_learnt(deployment, gpu, learnt), gpu)
    sized, model = with_kv_groups(sized), find_model(sized.model)
    if encodes:
        check_encoder(model, gpu, sized)
        return sized.model_copy(update={"gpu_memory_utilization": None}), ""
    capacity = kv_capacity(model, gpu, sized)
    if sized.gpu_memory_utilization is None:
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
    base, defaults = resolved(deployment.model_copy(update={"fleet": None}), *timed_by(calibration, gpu))
    lines = [defaults]
    if deployment.fleet is None:
        return base, tuple(filter(None, lines))
    pools = []
    for pool in deployment.fleet.pools:
        shared = gpu if pool.calibration is None else None
        timing = timed_by(pool.calibration or calibration, pool.gpu or shared)
        own, defaults = resolved(pool_deployment(deployment, pool), *timing, pool.role == "encode")
        lines.append(defaults)
        stated = pool.deployment.get("scheduler") or {}
        changed = _changed(base.scheduler, own.scheduler, stated)
        settings = merged(pool.deployment, {"scheduler": changed}) if changed else pool.deployment
        if own.quantization != base.quantization:
            settings = settings | {"quantization": own.quantization}
        pools.append(pool.model_copy(update={"deployment": settings}))
    fleet = deployment.fleet.model_copy(update={"pools": tuple(pools)})
    return base.model_copy(update={"fleet": fleet}), tuple(dict.fromkeys(filter(None, lines)))


def _changed(base: SchedulerConfig, own: SchedulerConfig, stated: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `own` that `base` has otherwise, or that are `stated`, as plain data."""
    pairs = ((name, getattr(own, name)) for name in SchedulerConfig.model_fields)
    changed = {name: value for name, value in pairs if name in stated or value != getattr(base, name)}
    return {n: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for n, v in changed.items()}


def base_deployment(calibration: str | None) -> Deployment:
    """Return the deployment that supplies what is not stated: the calibrated one, or without one a GPU's default.

    What holds only for the calibrated model and memory, `as_learnt` adds when all else is decided.
    """
    if calibration is None:
        return served()
    if names_own_cost(calibration):
        return Deployment()
    learnt = calibration_in(calibration)
    if isinstance(learnt, Calibration):  # an engine that was run here, and can run here again
        return learnt.learnt_as
    data = learnt.learnt_as.model_dump(mode="json", exclude_unset=True, exclude=_OF_ONE_MEMORY)
    known = parse(Deployment, data, where="calibration.deployment")
    unsaid = known.model_copy(update={"engine": None})  # the user has not stated the engine that was calibrated
    return unsaid if unsaid.engine_name.name == known.engine_name.name else known


def as_learnt(deployment: Deployment, gpu: GpuSpec, learnt: Learnt | None) -> Deployment:
    """Return `deployment` with quantization and KV blocks of `learnt` where it states none.

    The quantization holds for the same model, the blocks for the same GPU, weights, KV and sizes. Otherwise the blocks
    follow from the usual share of memory.
    """
    known = learnt.learnt_as if learnt else deployment
    if deployment.model == known.model and not deployment.states("quantization"):
        deployment = deployment.model_copy(update={"quantization": known.quantization})
    if deployment.gpu_memory_utilization is not None or deployment.scheduler.states("num_blocks"):
        return deployment
    same = all(getattr(deployment, name) == getattr(known, name) for name in _SIZED_BY)
    same = same and deployment.scheduler.block_size == known.scheduler.block_size
    if learnt and same and gpu == find_gpu(learnt.gpu) and known.scheduler.states("num_blocks"):
        return deployment.rescheduled(num_blocks=known.scheduler.num_blocks)
    return deployment.model_copy(update={"gpu_memory_utilization": UTILIZATION})


def timed_by(calibration: str | None, gpu: str | None) -> tuple[GpuSpec | None, Learnt | None]:
    """Return the GPU whose kernel tables time the steps, and the calibration that corrects them.

    Both are None if our own engine's calibration or a user's cost model times the steps.
    """
    if calibration is None:
        return find_gpu(gpu or ""), None
    learnt = None if names_own_cost(calibration) else calibration_in(calibration)
    if learnt is None or isinstance(learnt, Calibration):
        return None, None
    return find_gpu(gpu or learnt.gpu), learnt


def calibration_in(directory: str | Path) -> Calibration | Learnt:
    """Return the calibration in a directory, for our own engine or others. Raises UserError if there is none.

    The twin of a server that has changed since says so, and none of its steps counts as validated.
    """
    learnt = load_learnt(Path(directory)) or Calibration.load(directory)
    changed = drift(Path(directory))
    if not changed or isinstance(learnt, MeasuredRuns):
        return learnt
    return replace(learnt, untaught=changed[0].lower() + changed[1:])
