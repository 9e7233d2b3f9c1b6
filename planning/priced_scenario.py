"""One simulation, ready to be made: what is offered, to which fleet, and what times the steps of each of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from calibration.kernels.times import Coverage
from calibration.steps.observed import JudgedCost
from planning.costs import Priced, priced
from serving.cost_model import CostModel
from serving.deployments.config import Deployment
from serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from serving.errors import UserError
from serving.front_door import FrontDoor
from serving.workload import Workload
from sim.cluster import Cluster
from sim.priced_pool import PricedPool, alike_pools, plain_fleet, pool_deployment
from sim.router import find_router
from sim.run_log import RunSink, TableSink
from traces.run_metrics import RunMetrics

_MOST_REPLICAS = 100_000

AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@dataclass(frozen=True)
class PricedScenario:
    """`replicas` of a deployment behind a router or, where the deployment has a fleet, that fleet.

    pools               the fleet's pools where they are not all priced by `cost`
    router              a router's name; empty is the fleet's own, or round robin
    calibration         id of what times the steps of what no pool times by its own
    gpu                 what those run on; None for our own engine
    front_door          the API server through which clients reach it; None where they meet the router
    defaults            which settings its pools left to their engine, and what those are: a line each
    usd_per_gpu_hour    by pool, None where there is no price; and
    devices             by which names their prices are known
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

    @property
    def fleet(self) -> FleetConfig:
        """As it starts."""
        return self.deployment.fleet or plain_fleet(self.replicas)

    @property
    def routed_fleet(self) -> FleetConfig:
        """The same behind the router that routes."""
        router = RouterConfig(name=self.router) if self.router else self.fleet.router
        return self.fleet.model_copy(update={"router": router})

    @property
    def all_pools(self) -> Sequence[PricedPool]:
        """Each with what times its steps."""
        return self.pools or alike_pools(self.fleet, self.deployment, self.cost)

    @property
    def engines(self) -> int:
        """How many there are at the start."""
        return sum(pool.replicas for pool in self.fleet.pools)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of them, each of which is simulated as a replica."""
        return sum(pool.ranks * pool.config.replicas for pool in self.all_pools)

    @property
    def gpus(self) -> int:
        return sum(pool.deployment.gpus * pool.config.replicas for pool in self.all_pools)

    @property
    def num_blocks(self) -> int | None:
        """KV blocks of one replica, without the null block; None if they differ."""
        sizes = {pool.deployment.scheduler.num_blocks - 1 for pool in self.all_pools}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def routes_by(self) -> str:
        return self.router or self.fleet.router.name

    @property
    def judged(self) -> list[JudgedCost]:
        """What times the steps of each pool, where it knows how sure it is."""
        return [pool.cost for pool in self.all_pools if isinstance(pool.cost, JudgedCost)]

    def provenance(self) -> tuple[Coverage, str]:
        """How far to trust the steps simulated so far, and why: as far as those of its least certain pool."""
        return max((cost.provenance() for cost in self.judged), key=lambda provenance: provenance[0])

    def ends(self) -> list[PricedScenario]:
        """The same at the fast and at the slow end of the 90 % interval, known once the centre was simulated."""
        both = [cost.ends() for cost in self.judged]
        return [
            replace(
                self,
                pools=tuple(replace(pool, cost=end[at]) for pool, end in zip(self.all_pools, both, strict=True)),
            )
            for at in (0, 1)
        ]

    def requests(self, tokens: bool = False) -> pa.Table:
        """Simulate it; the dataset `requests` of its recording, of which nothing else is kept.

        With `tokens`, also when each token came.
        """
        sink = TableSink()
        self.cluster(Cluster, sink, steps=False, tokens=tokens).run(self.workload)
        return sink.requests

    def measured(self, slo: Mapping[str, float], full: bool = False) -> tuple[pa.Table, RunMetrics]:
        """Simulate it: its requests, and metrics under `slo`, bounds in ms; `full` adds those of steps and tokens."""
        sink = TableSink()
        cluster = self.cluster(Cluster, sink, steps=full, tokens=full)
        done = cluster.run(self.workload)
        run = {
            "replicas": self.engines,
            "num_blocks": self.num_blocks,
            "deployment": self.deployment.model_dump_json(),
            "replica_lives": cluster.lives,
            "duration_ns": done.duration_ns,
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
        }
        return sink.requests, RunMetrics(sink.requests, sink.steps if full else None, run, slo, self.gpus or None)

    def cluster(self, kind: type[AnyCluster], sink: RunSink, steps: bool = True, **settings: Any) -> AnyCluster:
        """Its fleet, as `kind` makes it with these further settings; rows go to `sink`.

        Steps are also kept where an API server needs to know of them.
        """
        return kind(
            self.deployment,
            self.cost,
            sink,
            replicas=self.replicas,
            pools=self.pools,
            router=find_router(self.router) if self.router else None,
            shares_prefixes=self.workload.shares_prefixes,
            steps=steps or self.front_door is not None,
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
    """Steps are timed as `costs.priced` has it; a pool of the deployment's fleet may be timed by another GPU.

    `prices` are dollars per GPU-hour by name, instead of the catalogue's. Raises UserError for what does not fit.
    """
    if router:
        find_router(router)
    own = priced(calibration, gpu, deployment.model_copy(update={"fleet": None}))  # which has no part in a step's time
    fleet, pools, timed = deployment.fleet, None, [own]
    if fleet is not None:
        if replicas is not None:
            remedy = "cannot be combined with a deployment that has a fleet; set the replicas of its pools"
            raise UserError("replicas", replicas, remedy)
        timed = [_priced_pool(pool, own, calibration, gpu, deployment) for pool in fleet.pools]
        pools = tuple(PricedPool(pool, by.deployment, by.cost) for pool, by in zip(fleet.pools, timed, strict=True))
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
            pool.name: by.usd_per_gpu_hour(prices or {})
            for pool, by in zip((fleet or plain_fleet(1)).pools, timed, strict=True)
        },
        tuple(dict.fromkeys(by.device for by in timed)),
        defaults=tuple(dict.fromkeys(by.defaults for by in timed if by.defaults)),
    )


def with_fleet(deployment: Deployment, replicas: int | None, router: RouterConfig | str | None) -> Deployment:
    """`deployment` with a fleet (of one replica, if it has none), the replicas of its first pool and its router
    replaced if they are given; a router may be a name.
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
    pool: PoolConfig, own: Priced, calibration: str | None, gpu: str | None, deployment: Deployment
) -> Priced:
    """What a pool runs and is timed by: its own calibration or GPU, or else what prices `own`.

    What it changes in the deployment is priced anew, its KV blocks by its GPU's memory included. A calibration of its
    own brings its GPU.
    """
    if not pool.deployment and pool.gpu is None and pool.calibration is None:
        return own._replace(deployment=pool_deployment(own.deployment, pool))
    shared = gpu if pool.calibration is None else None
    return priced(pool.calibration or calibration, pool.gpu or shared, pool_deployment(deployment, pool))
