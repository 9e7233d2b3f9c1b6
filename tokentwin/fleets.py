"""Which fleet a verb simulates, and what times the steps of each of its pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokentwin.costs import Priced, priced

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


def pool_prices(
    fleet: FleetConfig,
    own: Priced,
    calibration: str | None,
    gpu: str | None,
    settle: Callable[[Deployment], Deployment],
) -> list[Priced]:
    """What each pool of `fleet` runs and is timed by: its own calibration or GPU, or else what prices `own`.

    What a pool changes in the deployment that `settle` makes is priced anew, its KV blocks by its GPU's memory
    included. A calibration of its own brings its GPU. Raises UserError when they do not go together.
    """
    from sim.fleet import pool_deployment

    def price(pool: PoolConfig) -> Priced:
        if not pool.deployment and pool.gpu is None and pool.calibration is None:
            return own._replace(deployment=pool_deployment(own.deployment, pool))
        shared = gpu if pool.calibration is None else None
        return priced(
            pool.calibration or calibration, pool.gpu or shared, lambda base: pool_deployment(settle(base), pool)
        )

    return [price(pool) for pool in fleet.pools]


def priced_pools(fleet: FleetConfig, prices: Sequence[Priced]) -> list[PricedPool]:
    """The pools of `fleet`, each with its price."""
    from sim.fleet import PricedPool

    return [PricedPool(pool, price.deployment, price.cost) for pool, price in zip(fleet.pools, prices, strict=True)]


def usd_per_gpu_hour(
    fleet: FleetConfig, priced: Sequence[Priced], prices: Mapping[str, float]
) -> dict[str, float | None]:
    """What a GPU of each pool costs; `prices` by the GPU's name take the place of the catalogue's."""
    return {pool.name: price.usd_per_gpu_hour(prices) for pool, price in zip(fleet.pools, priced, strict=True)}


def ends(pools: list[PricedPool]) -> list[list[PricedPool]]:
    """The pools at the lower ends of their 90 % intervals of step times, and at the upper ends."""
    from dataclasses import replace

    both = [pool.cost.ends() for pool in pools]  # type: ignore[attr-defined]
    return [[replace(pool, cost=end[at]) for pool, end in zip(pools, both, strict=True)] for at in (0, 1)]
