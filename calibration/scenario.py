"""One simulation that is to be held against another: what is offered, to what, and how its steps are timed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from calibration.kernel_times import Mark
from serving.config import Deployment
from serving.cost_model import CostModel
from serving.workload import Workload
from sim.cluster import Cluster
from sim.fleet import PricedPool
from sim.router import find_router
from sim.run_log import TableSink


@dataclass(frozen=True)
class Scenario:
    """`replicas` of a deployment behind a router or, where the deployment has a fleet, that fleet.

    pools   the fleet's pools where they are not all priced by `cost`
    router  a router's name; empty is the fleet's own, or round robin
    """

    workload: Workload
    deployment: Deployment
    cost: CostModel
    replicas: int = 1
    router: str = ""
    pools: tuple[PricedPool, ...] | None = field(default=None, repr=False)

    @property
    def engines(self) -> int:
        """How many there are at the start."""
        fleet = self.deployment.fleet
        return self.replicas if fleet is None else sum(pool.replicas for pool in fleet.pools)

    @property
    def routes_by(self) -> str:
        """The router's name."""
        fleet = self.deployment.fleet
        return self.router or ("round-robin" if fleet is None else fleet.router.name)

    @property
    def closed(self) -> bool:
        """Whether arrivals depend on answers."""
        return self.workload.concurrency is not None or any(
            request.think_ns is not None for request in self.workload.requests
        )

    def standing(self) -> tuple[Mark, str]:
        """How far to trust the steps simulated so far, and why: as far as those of its least certain pool."""
        costs = [pool.cost for pool in self.pools] if self.pools else [self.cost]
        return max((cost.standing() for cost in costs), key=lambda standing: standing[0])  # type: ignore[attr-defined]

    def requests(self, tokens: bool = False) -> pa.Table:
        """Simulate it; the dataset `requests` of its recording, of which nothing else is kept.

        With `tokens`, also when each token came.
        """
        sink = TableSink()
        Cluster(
            self.deployment,
            self.cost,
            sink,
            replicas=self.replicas,
            pools=self.pools,
            router=find_router(self.router) if self.router else None,
            shares_prefixes=self.workload.shares_prefixes,
            steps=False,
            tokens=tokens,
        ).run(self.workload)
        return sink.requests
