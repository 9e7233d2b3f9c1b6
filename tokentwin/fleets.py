"""Which fleet a verb simulates, and what times the steps of each of its pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokentwin.costs import Priced, priced
from tokentwin.deployments import read_deployment

if TYPE_CHECKING:
    from serving.config import Deployment
    from serving.fleet import FleetConfig, PoolConfig
    from sim.fleet import PricedPool


def asked_fleet(fleet: FleetConfig | None, replicas: int | None, router: str | None) -> FleetConfig:
    """`fleet` (None: one replica) with the replicas of its first pool, and its router, replaced if they are given."""
    from serving.fleet import FleetConfig, RouterConfig

    fleet = fleet or FleetConfig()
    if replicas is not None:
        first = fleet.pools[0].model_copy(update={"replicas": replicas})
        fleet = fleet.model_copy(update={"pools": (first, *fleet.pools[1:])})
    return fleet if router is None else fleet.model_copy(update={"router": RouterConfig(name=router)})


def priced_pools(
    fleet: FleetConfig,
    own: Priced,
    calibration: str | None,
    gpu: str | None,
    deployment_file: str | None,
    flags: dict[str, Any],
) -> list[PricedPool]:
    """The pools of `fleet`: each by its own calibration or GPU, or else as the deployment `own` is priced.

    What a pool changes in the deployment is priced anew, its KV blocks by its GPU's memory included.
    """
    from sim.fleet import PricedPool, pool_deployment

    def priced_pool(pool: PoolConfig) -> Priced:
        if not pool.deployment and pool.gpu is None and pool.calibration is None:
            return own._replace(deployment=pool_deployment(own.deployment, pool))

        def settle(otherwise: Deployment) -> Deployment:
            return pool_deployment(read_deployment(deployment_file, flags, otherwise), pool)

        return priced(pool.calibration or calibration, pool.gpu or gpu, settle)

    prices = [priced_pool(pool) for pool in fleet.pools]
    return [PricedPool(pool, price.deployment, price.cost) for pool, price in zip(fleet.pools, prices, strict=True)]


def ends(pools: list[PricedPool]) -> list[list[PricedPool]]:
    """The pools at the lower ends of their 90 % intervals of step times, and at the upper ends."""
    from dataclasses import replace

    both = [pool.cost.ends() for pool in pools]  # type: ignore[attr-defined]
    return [[replace(pool, cost=end[at]) for pool, end in zip(pools, both, strict=True)] for at in (0, 1)]
