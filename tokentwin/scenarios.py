"""From what a command was told to a scenario to simulate: the deployment, what prices each of its pools, the router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokentwin.costs import Priced, priced
from tokentwin.fleets import pool_prices, priced_pools

if TYPE_CHECKING:
    from calibration.scenario import Scenario
    from serving.config import Deployment
    from serving.workload import Workload


class PricedScenario(NamedTuple):
    """A scenario, and what prices the steps of whatever has no price of its own in it."""

    scenario: Scenario
    price: Priced


def priced_scenario(
    workload: Workload,
    calibration: str | None,
    gpu: str | None,
    settle: Callable[[Deployment], Deployment],
    replicas: int | None = None,
    router: str = "",
) -> PricedScenario:
    """`settle` makes the deployment, as for `costs.priced`; a pool of its fleet may be timed by another GPU.

    Raises UserError when they do not go together.
    """
    from calibration.scenario import Scenario
    from serving.errors import UserError
    from sim.router import find_router

    if router:
        find_router(router)
    asked: list[Deployment] = []

    def settled(base: Deployment) -> Deployment:
        asked.append(settle(base))
        return asked[-1].model_copy(update={"fleet": None})  # which has no part in a step's time

    own = priced(calibration, gpu, settled)
    fleet, pools = asked[-1].fleet, None
    if fleet is not None:
        if replicas is not None:
            raise UserError("replicas", replicas, "is said by the deployment's fleet; leave it out")
        pools = tuple(priced_pools(fleet, pool_prices(fleet, own, calibration, gpu, settle)))
    deployment = own.deployment.model_copy(update={"fleet": fleet})
    return PricedScenario(Scenario(workload, deployment, own.cost, replicas or 1, router, pools), own)


def offered_workloads(trace: str, seeds: int, limit: int | None, rate_scale: float | None) -> list[Workload]:
    """The workload of a trace or, of a specification of a synthetic one in YAML, those of `seeds` seeds.

    Raises UserError for a trace with several seeds: it has happened once.
    """
    from dataclasses import replace

    from serving.errors import UserError
    from traces.reader import read_workload
    from traces.reshape import reshaped

    if Path(trace).suffix in (".yaml", ".yml"):
        made = _synthesised(trace, seeds)
    elif seeds > 1:
        raise UserError("seeds", seeds, "need a specification in YAML as --trace; a recorded trace has happened once")
    else:
        made = [read_workload(trace)]
    workloads = [reshaped(workload, limit=limit, rate_scale=rate_scale) for workload in made]
    held = [replace(workload, requests=list(workload.requests)) for workload in workloads]
    if not all(workload.requests for workload in held):
        raise UserError("trace", trace, "holds no requests")
    return held


def _synthesised(path: str, seeds: int) -> list[Workload]:
    from traces.synth import read_spec, synthesise

    spec = read_spec(path)
    return [synthesise(spec.model_copy(update={"seed": spec.seed + number})) for number in range(seeds)]
