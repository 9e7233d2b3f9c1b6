"""The fleet that a twin serves: the deployment's fleet, changed by the options of `tokentwin serve`."""

from __future__ import annotations

from typing import Any

from tokentwin.apiserver.settings import ServeSettings
from tokentwin.planning.priced_scenario import with_fleet
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig
from tokentwin.serving.errors import UserError


def served_fleet(settings: ServeSettings, deployment: Deployment) -> Deployment:
    """Return `deployment` with the fleet to serve. Raises UserError for options that cannot be combined."""
    deployment = with_fleet(deployment, settings.replicas, settings.router)
    fleet = deployment.fleet
    assert fleet is not None
    failures = fleet.failures.model_dump() if settings.failures is None else settings.failures.of_replicas
    data = {**fleet.model_dump(), "failures": failures}
    fleet = parse(FleetConfig, data, where="failures")
    if settings.role != "serve" and fleet.prefills_apart:
        raise UserError("role", settings.role, "is what a gateway decides; leave prefill and decode pools out")
    if settings.ports_per_replica:
        fleet = _one_by_one(fleet)
    return deployment.model_copy(update={"fleet": fleet})


def class_of(place: int) -> str:
    """Return the SLO class of requests to the port of the replica at `place`."""
    return f"port-{place}"


def _one_by_one(fleet: FleetConfig) -> FleetConfig:
    """Return `fleet` with a pool for each replica; the pool gets the requests to the replica's port.

    A replay of the recording then routes requests in the same way.
    """
    places: dict[str, list[str]] = {}  # names of the new pools, by the pool that they replace
    pools: list[PoolConfig] = []
    for pool in fleet.pools:
        if pool.role != "serve" or pool.slo_classes:
            remedy = "has a role or SLO classes; with ports-per-replica the gateway before the twin decides that"
            raise UserError(f"fleet.pools.{pool.name}", pool.role, remedy)
        names = places[pool.name] = [f"{pool.name}-{at}" for at in range(pool.replicas)]
        for name in names:
            own = {"name": name, "replicas": 1, "slo_classes": (class_of(len(pools)),)}
            pools.append(pool.model_copy(update=own))
    if fleet.autoscaler is not None:
        remedy = "cannot be combined with ports-per-replica, whose replicas stay as many"
        raise UserError("fleet.autoscaler", fleet.autoscaler[0].metric, remedy)
    failures = fleet.failures.model_dump()
    for kind in ("crashes", "slowdowns"):
        failures[kind] = [placed for failure in failures[kind] if (placed := _placed(failure, places))]
    return parse(FleetConfig, {**fleet.model_dump(), "pools": pools, "failures": failures}, where="fleet")


def _placed(accident: dict[str, Any], places: dict[str, list[str]]) -> dict[str, Any] | None:
    """Return a failure of a replica for the replica's new pool; None if there is no such replica."""
    names = places[accident["pool"] or next(iter(places))]
    replica = accident["replica"]
    return {**accident, "pool": names[replica], "replica": 0} if replica < len(names) else None
