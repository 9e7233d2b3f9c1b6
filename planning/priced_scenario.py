"""One simulation, ready to run: a workload, a fleet, and a cost model for each of its pools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from tokentwin.calibration.steps.observed import JudgedCost
from tokentwin.calibration.trust import Trust, least_certain
from tokentwin.planning.costs import Priced, priced
from tokentwin.planning.learn.front_door import learnt_front_door
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment, pool_deployment
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig, plain_fleet
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import Workload, common_prefix
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.fleet import PricedPool, alike_pools
from tokentwin.sim.router import find_router
from tokentwin.sim.run_log import RunSink, TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.step_metrics import StepWork

_MOST_REPLICAS = 100_000

AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@dataclass(frozen=True)
class PricedScenario:
    """A workload for `replicas` of a deployment behind a router; if the deployment has a fleet, for that fleet.

    Attributes:
        pools: the fleet's pools, if `cost` does not time the steps of all of them
        router: name of a router; empty for the fleet's router, or round robin
        calibration: id of the calibration for pools without their own calibration
        gpu: the GPU of these pools; None for our own engine
        front_door: the API server between clients and fleet; None if clients reach the router directly
        defaults: a line for each set of settings that pools left to their engine, with their values
        usd_per_gpu_hour: price by pool, in dollars; None for a pool without a price
        devices: names under which prices list the devices
        site: `pue` and `grid_gco2_per_kwh` of the place where the fleet is, if they are stated
    """

    workload: Workload
    deployment: Deployment
    cost: CostModel
    replicas: int = 1
    router: str = ""
    pools: tuple[PricedPool, ...] | None = field(default=None, repr=False)
    calibration: str = ""
    gpu: str | None = None
    usd_per_gpu_hour: Mapping[str, float | None] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    front_door: FrontDoor | None = None
    defaults: tuple[str, ...] = ()
    site: Mapping[str, float] = field(default_factory=dict)

    @property
    def fleet(self) -> FleetConfig:
        """The fleet at the start of the run."""
        return self.deployment.fleet or plain_fleet(self.replicas)

    @property
    def routed_fleet(self) -> FleetConfig:
        """The fleet with the router that is used."""
        router = RouterConfig(name=self.router) if self.router else self.fleet.router
        return self.fleet.model_copy(update={"router": router})

    @property
    def all_pools(self) -> Sequence[PricedPool]:
        """All pools, each with its cost model."""
        return self.pools or alike_pools(self.fleet, self.deployment, self.cost)

    @property
    def engines(self) -> int:
        """Number of engines at the start."""
        return sum(pool.replicas for pool in self.fleet.pools)

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks of the engines; each rank is simulated as a replica."""
        return sum(pool.ranks * pool.config.replicas for pool in self.all_pools)

    @property
    def gpus(self) -> int:
        return sum(pool.deployment.gpus * pool.config.replicas for pool in self.all_pools)

    @property
    def num_blocks(self) -> int | None:
        """KV blocks of one replica, without the null block; None if replicas differ. Encoder replicas have none."""
        sizes = {pool.deployment.scheduler.num_blocks - 1 for pool in self.all_pools if pool.config.role != "encode"}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def routes_by(self) -> str:
        return self.router or self.fleet.router.name

    @property
    def seen_by(self) -> str:
        """A sentence that says that latencies are those that clients see; empty if they are not."""
        return "" if self.front_door is None else self.front_door.said

    @property
    def judged(self) -> list[JudgedCost]:
        """The cost models that state the trust in their step times."""
        return [pool.cost for pool in self.all_pools if isinstance(pool.cost, JudgedCost)]

    @property
    def work(self) -> StepWork | None:
        """The work of a step, relative to the GPU; None if the GPU is not of the catalogue, and for different pools."""
        gpu = gpus().get(self.gpu or "")
        return StepWork.on(self.deployment, gpu) if gpu else None

    def check_site(self, steps: bool = True) -> None:
        """Raise UserError if `site` is stated, and the power is not known, or no steps are kept to estimate it."""
        if not self.site or (steps and self.work is not None and self.work.power is not None):
            return
        name, value = next(iter(self.site.items()))
        remedy = "needs the power of one known GPU, the same in all pools; leave it out, or name such a GPU"
        if not steps:
            remedy = "needs recorded steps, from which energy is estimated; leave it out, or keep them"
        raise UserError(name, value, remedy)

    def trust(self) -> Trust:
        """Return the trust in the steps simulated so far, which is the trust in the least certain pool."""
        return least_certain(cost.trust() for cost in self.judged)

    @property
    def has_bands(self) -> bool:
        """True if the ends of the interval can be simulated. A user's own process runs once, in the run itself."""
        return not self.fleet.processes

    def ends(self) -> list[PricedScenario]:
        """Return this scenario at the fast and at the slow end of the 90 % interval of step times.

        The ends are known only after this scenario was simulated.
        """
        both = [cost.ends() for cost in self.judged]
        return [
            replace(
                self,
                pools=tuple(replace(pool, cost=end[at]) for pool, end in zip(self.all_pools, both, strict=True)),
            )
            for at in (0, 1)
        ]

    def requests(self, tokens: bool = False) -> pa.Table:
        """Simulate the scenario and return the dataset `requests`; if `tokens` is set, with the time of each token."""
        sink = TableSink()
        self.cluster(Cluster, sink, steps=False, tokens=tokens).run(self.workload)
        return sink.requests

    def measured(self, slo: Mapping[str, float], full: bool = False) -> tuple[pa.Table, RunMetrics]:
        """Simulate the scenario and return its requests and metrics.

        `slo` has latency bounds in ms. `full` adds the metrics of steps and tokens.
        """
        sink = TableSink()
        cluster = self.cluster(Cluster, sink, steps=full, tokens=full)
        done = cluster.run(self.workload)
        run = {
            "replicas": self.engines,
            "num_blocks": self.num_blocks,
            "deployment": self.deployment.model_dump_json(),
            "replica_lives": cluster.replica_lives,
            "duration_ns": done.duration_ns,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "notes": json.dumps({"site": dict(self.site)}),
        }
        steps, work = (sink.steps, self.work) if full else (None, None)
        return sink.requests, RunMetrics(sink.requests, steps, run, slo, self.gpus or None, work)

    def cluster(self, kind: type[AnyCluster], sink: RunSink, steps: bool = True, **settings: Any) -> AnyCluster:
        """Return the fleet as a cluster of class `kind` with further `settings`; it writes its rows to `sink`."""
        return kind(
            self.deployment,
            self.cost,
            sink,
            replicas=self.replicas,
            pools=self.pools,
            router=find_router(self.router) if self.router else None,
            shares_prefixes=self.workload.shares_prefixes,
            steps=steps,
            front_door=self.front_door,
            **settings,
        )


def price_scenario(
    workload: Workload,
    calibration: str | None,
    gpu: str | None,
    deployment: Deployment,
    replicas: int | None = None,
    router: str = "",
    prices: Mapping[str, float] | None = None,
) -> PricedScenario:
    """Return a scenario with step times as in `costs.priced`; a pool of the fleet may be timed by another GPU.

    If `calibration` is the twin of a server, the scenario has its front door.
    `prices` are dollars per GPU-hour by name, and replace the catalogue's. Raises UserError for arguments that do not
    go together.
    """
    if router:
        find_router(router)
    prefix = common_prefix(workload.requests)
    own = priced(calibration, gpu, deployment.model_copy(update={"fleet": None}), prefix)  # times ignore the fleet
    fleet, pools, timed = deployment.fleet, None, [own]
    if fleet is not None:
        if replicas is not None:
            remedy = "cannot be combined with a deployment that has a fleet; set the replicas of its pools"
            raise UserError("replicas", replicas, remedy)
        timed = [_priced_pool(pool, own, calibration, gpu, deployment, prefix) for pool in fleet.pools]
        pools = tuple(
            PricedPool(pool, timing.deployment, timing.cost) for pool, timing in zip(fleet.pools, timed, strict=True)
        )
    return PricedScenario(
        workload,
        own.deployment.model_copy(update={"fleet": fleet}),
        own.cost,
        replicas or 1,
        router,
        pools,
        own.calibration,
        own.gpu.name if own.gpu else None,
        {
            pool.name: timing.usd_per_gpu_hour(prices or {}) if pool.usd_per_gpu_hour is None else pool.usd_per_gpu_hour
            for pool, timing in zip((fleet or plain_fleet(1)).pools, timed, strict=True)
        },
        tuple(dict.fromkeys(timing.device for timing in timed)),
        learnt_front_door(calibration),
        defaults=tuple(dict.fromkeys(timing.defaults for timing in timed if timing.defaults)),
    )


def with_fleet(deployment: Deployment, replicas: int | None, router: RouterConfig | str | None) -> Deployment:
    """Return `deployment` with a fleet, by default a fleet of one replica.

    `replicas` replaces the number of replicas in the fleet's first pool. `router`, which may be a name, replaces the
    fleet's router.
    """
    fleet = deployment.fleet or FleetConfig()
    if replicas is not None:
        if not 1 <= replicas <= _MOST_REPLICAS:
            raise UserError("replicas", replicas, f"must be from 1 to {_MOST_REPLICAS:,}")
        first = fleet.pools[0].model_copy(update={"replicas": replicas})
        fleet = fleet.model_copy(update={"pools": (first, *fleet.pools[1:])})
    if router:
        named = RouterConfig(name=router) if isinstance(router, str) else router
        fleet = fleet.model_copy(update={"router": named})
    return deployment.model_copy(update={"fleet": fleet})


def _priced_pool(
    pool: PoolConfig, own: Priced, calibration: str | None, gpu: str | None, deployment: Deployment, shared_prefix: int
) -> Priced:
    """Return a pool's deployment and cost model: from its own calibration or GPU, or else `own`.

    If the pool changes settings of the deployment, it gets a cost model for them, and KV blocks from the memory of its
    GPU. If the pool has a calibration, that also names the GPU.
    """
    if not pool.deployment and pool.gpu is None and pool.calibration is None:
        return own._replace(deployment=pool_deployment(own.deployment, pool))
    of_all = gpu if pool.calibration is None else None
    named = pool.calibration or calibration, pool.gpu or of_all
    return priced(*named, pool_deployment(deployment, pool), shared_prefix, pool.role == "encode")
