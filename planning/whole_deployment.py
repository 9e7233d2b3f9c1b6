"""A deployment that states all defaults of its engines, on the GPUs of all its pools."""

from __future__ import annotations

from planning.costs import timing_gpu
from serving.deployments.config import Deployment, merged, pool_deployment
from serving.deployments.engines import defaults_taken, with_engine_defaults
from serving.deployments.gpu_spec import GpuSpec


def whole_deployment(
    deployment: Deployment, calibration: str | None, gpu: str | None
) -> tuple[Deployment, tuple[str, ...]]:
    """Return `deployment` with its engines' defaults, and a line with the defaults of each engine.

    `calibration` or `gpu` times the steps of the deployment.
    Raises UserError for a GPU or a calibration that does not exist.
    """
    filled, lines = _filled(deployment, timing_gpu(calibration, gpu))
    if deployment.fleet is None:
        return filled, tuple(lines)
    pools = []
    for pool in deployment.fleet.pools:
        shared = gpu if pool.calibration is None else None
        own_gpu = timing_gpu(pool.calibration or calibration, pool.gpu or shared)
        own, more = _filled(pool_deployment(deployment, pool), own_gpu)
        lines += more
        inherited = pool_deployment(filled, pool).scheduler.model_dump()
        changed = {name: value for name, value in own.scheduler.model_dump().items() if inherited.get(name) != value}
        settings = merged(pool.deployment, {"scheduler": changed}) if changed else pool.deployment
        pools.append(pool.model_copy(update={"deployment": settings}))
    fleet = deployment.fleet.model_copy(update={"pools": tuple(pools)})
    return filled.model_copy(update={"fleet": fleet}), tuple(dict.fromkeys(lines))


def _filled(deployment: Deployment, gpu: GpuSpec | None) -> tuple[Deployment, list[str]]:
    """Return `deployment` with its engine's defaults on `gpu`; without a GPU it stays unchanged."""
    if gpu is None:
        return deployment, []
    taken = defaults_taken(deployment, gpu)
    return with_engine_defaults(deployment, gpu), [taken] if taken else []
