"""What a run's configuration comes to: a priced fleet and its traffic, ready to be simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokentwin.sweeps.run_config import RunConfig

if TYPE_CHECKING:
    import pyarrow as pa

    from calibration.kernel_times import Mark
    from serving.fleet import FleetConfig
    from sim.fleet import PricedPool
    from tokentwin.costs import Priced
    from traces.run_metrics import RunMetrics


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave."""

    requests: pa.Table
    metrics: RunMetrics


@dataclass(frozen=True)
class Scenario:
    """A run, priced.

    own     the deployment, and what times it where a pool has nothing of its own
    prices  the same of each pool
    pools   what is simulated: at the centre of the cost models' intervals, or at one end
    """

    config: RunConfig
    own: Priced
    fleet: FleetConfig
    prices: Sequence[Priced]
    pools: Sequence[PricedPool]

    @classmethod
    def of(cls, config: RunConfig) -> Scenario:
        """Raises UserError when the settings of `config` do not go together."""
        from sim.fleet import plain_fleet
        from tokentwin.costs import priced
        from tokentwin.fleets import pool_prices, priced_pools

        alone = config.deployment.model_copy(update={"fleet": None})  # which has no part in a step's time
        own = priced(config.calibration, config.gpu, lambda _: alone)
        fleet = config.deployment.fleet or plain_fleet(config.replicas or 1)
        prices = pool_prices(fleet, own, config.calibration, config.gpu, lambda _: alone)
        return cls(config, own, fleet, prices, priced_pools(fleet, prices))

    @property
    def gpus(self) -> int:
        """GPUs of the fleet as it starts."""
        return sum(pool.gpus * pool.config.replicas for pool in self.pools)

    @property
    def num_blocks(self) -> int | None:
        """KV blocks of one replica, without the null block; None if they differ."""
        sizes = {pool.deployment.scheduler.num_blocks - 1 for pool in self.pools}
        return sizes.pop() if len(sizes) == 1 else None

    def ends(self) -> list[Scenario]:
        """The same at the fast and at the slow end of the 90 % interval, known once the centre was simulated."""
        from tokentwin.fleets import ends

        return [replace(self, pools=end) for end in ends(list(self.pools))]

    def standing(self) -> tuple[Mark, str]:
        """How far the step times asked for so far can be trusted, and why."""
        return max((price.cost.standing() for price in self.prices), key=lambda standing: standing[0])

    def simulated(self, full: bool = False) -> Simulated:
        """Simulate it; `full` also gives the metrics of steps and of tokens."""
        from sim.cluster import Cluster
        from sim.router import find_router
        from sim.run_log import TableSink
        from tokentwin.fleets import usd_per_gpu_hour
        from traces.run_metrics import RunMetrics

        router = self.config.router
        workload, sink = self.config.offered(), TableSink()
        cluster = Cluster(
            self.own.deployment,
            self.own.cost,
            sink,
            router=find_router(router.name, **router.settings) if router else None,
            fleet=self.fleet,
            pools=self.pools,
            shares_prefixes=workload.shares_prefixes,
            steps=full,
            tokens=full,
        )
        done = cluster.run(workload)
        run = {
            "replicas": sum(pool.config.replicas for pool in self.pools),
            "num_blocks": self.num_blocks,
            "replica_lives": cluster.lives,
            "duration_ns": done.duration_ns,
            "usd_per_gpu_hour": usd_per_gpu_hour(self.fleet, self.prices, self.config.prices),
        }
        metrics = RunMetrics(sink.requests, sink.steps if full else None, run, self.config.slo, self.gpus or None)
        return Simulated(sink.requests, metrics)
