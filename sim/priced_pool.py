"""The pools of a fleet: replicas, the deployment they run, and the cost model of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serving.cost_model import CostModel, NetworkedCost
from serving.deployments.config import Deployment, parse, with_stated_blocks
from serving.deployments.fleet import FleetConfig, PoolConfig
from serving.errors import UserError


@dataclass(frozen=True)
class PricedPool:
    """A pool, the deployment its replicas run, and the cost model of their steps."""

    config: PoolConfig
    deployment: Deployment
    cost: CostModel

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of one engine. Each has its own scheduler and is simulated as a replica."""
        return self.deployment.data_parallel_size

    @property
    def gpus(self) -> int:
        """The number of GPUs of one rank."""
        return self.deployment.gpus // self.ranks


def networked(pool: PricedPool) -> NetworkedCost:
    """Return the pool's cost model, which must know what engines send between nodes.

    Raises UserError if it does not, or if the engines have pipeline stages.
    """
    if not isinstance(pool.cost, NetworkedCost):
        remedy = "needs the kernel tables of a GPU; simulate with --gpu, or leave it out"
        raise UserError("fleet.links.shares_inter_node", True, remedy)
    if (stages := pool.deployment.pipeline_parallel_size) > 1:
        remedy = "cannot be combined with fleet.links.shares_inter_node; leave one of them out"
        raise UserError("pipeline_parallel_size", stages, remedy)
    return pool.cost


def plain_fleet(replicas: int) -> FleetConfig:
    """Return a fleet of one pool with a round-robin router."""
    return FleetConfig(pools=(PoolConfig(replicas=replicas),))


def alike_pools(fleet: FleetConfig, deployment: Deployment, cost: CostModel) -> list[PricedPool]:
    """Return the pools of `fleet`, all with the cost model `cost`."""
    return [PricedPool(pool, pool_deployment(deployment, pool), cost) for pool in fleet.pools]


def pool_deployment(deployment: Deployment, pool: PoolConfig) -> Deployment:
    """Return `deployment` with the pool's own settings. Raises UserError that names a wrong setting."""
    where = f"fleet.pools.{pool.name}.deployment"
    own = _own_deployment(deployment, pool, where)
    if own.kv_tiers is not None and pool.role != "serve":
        raise UserError(f"{where}.kv_tiers", None, f"needs a pool of role serve, not {pool.role}; set it to null")
    return own


def _own_deployment(deployment: Deployment, pool: PoolConfig, where: str) -> Deployment:
    alone = deployment.model_copy(update={"fleet": None})
    if not pool.deployment:
        return alone
    if "fleet" in pool.deployment:
        remedy = "a pool cannot have a fleet of its own; leave it out"
        raise UserError(f"{where}.fleet", pool.deployment["fleet"], remedy)
    own = parse(Deployment, merged(alone.model_dump(exclude_unset=True), pool.deployment), where=where)
    scheduler = pool.deployment.get("scheduler")
    return with_stated_blocks(own) if isinstance(scheduler, dict) and "num_blocks" in scheduler else own


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`; nested mappings are merged in the same way."""
    found = dict(base)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        found[name] = merged(base[name], value) if nested else value
    return found
