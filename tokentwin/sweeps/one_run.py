"""One run of a sweep: from a point to its row. A pure function of the point, wherever it is called."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from serving.errors import UserError
from tokentwin.sweeps.columns import metric_values
from tokentwin.sweeps.points import Point
from tokentwin.sweeps.run_config import RunConfig

if TYPE_CHECKING:
    from serving.config import Deployment
    from serving.fleet import PoolConfig
    from tokentwin.costs import Priced


@dataclass(frozen=True)
class Outcome:
    """What a run gave: values by column (`status` among them), and its requests as a Parquet file if kept."""

    point: Point
    values: dict[str, Any]
    requests: bytes | None = None


def failed(point: Point, error: str) -> Outcome:
    """The outcome of a run that came to nothing."""
    return Outcome(point, {"status": "failed", "error": " ".join(error.split())})


@dataclass(frozen=True)
class Measure:
    """Simulates points. `full` also keeps steps and tokens for the metrics, `requests` the requests for the reader."""

    full: bool = False
    requests: bool = False

    def __call__(self, point: Point) -> Outcome:
        if point.error:
            return failed(point, point.error)
        try:
            return self._simulated(point)
        except UserError as error:
            return failed(point, str(error))
        except Exception as error:  # a user's policy may fail in any way, and the sweep goes on
            return failed(point, f"{type(error).__name__}: {error}")

    def _simulated(self, point: Point) -> Outcome:
        from sim.cluster import Cluster
        from sim.fleet import PricedPool, plain_fleet
        from sim.router import find_router
        from sim.run_log import TableSink
        from traces.run_metrics import RunMetrics

        config = RunConfig.model_validate(point.config)
        own = priced(config, config.deployment)
        fleet = config.deployment.fleet or plain_fleet(config.replicas or 1)
        prices = [_pool_price(config, own, pool) for pool in fleet.pools]
        pools = [
            PricedPool(pool, price.deployment, price.cost) for pool, price in zip(fleet.pools, prices, strict=True)
        ]
        router = find_router(config.router.name, **config.router.settings) if config.router else None
        workload, sink = config.offered(), TableSink()
        cluster = Cluster(
            own.deployment,
            own.cost,
            sink,
            router=router,
            fleet=fleet,
            pools=pools,
            shares_prefixes=workload.shares_prefixes,
            steps=self.full,
            tokens=self.full,
        )
        cluster.run(workload)
        sizes = {pool.deployment.scheduler.num_blocks - 1 for pool in pools}
        run = {
            "replicas": sum(pool.config.replicas for pool in pools),
            "num_blocks": sizes.pop() if len(sizes) == 1 else None,
            "replica_lives": cluster.lives,
        }
        gpus = sum(pool.gpus * pool.config.replicas for pool in pools)
        metrics = RunMetrics(sink.requests, sink.steps if self.full else None, run, config.slo, gpus or None)
        mark, reason = max((price.cost.standing() for price in prices), key=lambda standing: standing[0])
        values = {
            "status": "complete",
            **metric_values(metrics),
            "calibration_id": own.calibration,
            "standing": mark.name.lower(),
            "standing_reason": reason,
            "gpus": gpus,
            "num_blocks": run["num_blocks"],
        }
        return Outcome(point, values, _parquet(sink.requests) if self.requests else None)


def priced(config: RunConfig, deployment: Deployment, gpu: str | None = None, calibration: str | None = None) -> Priced:
    """`deployment` and what times it: on a GPU or by a calibration of its own, or else those of `config`."""
    from tokentwin.costs import priced as priced_by

    if gpu is None and calibration is None:
        gpu, calibration = config.gpu, config.calibration
    alone = deployment.model_copy(update={"fleet": None})  # which has no part in a step's time
    return priced_by(calibration, gpu, lambda _: alone)


def _pool_price(config: RunConfig, own: Priced, pool: PoolConfig) -> Priced:
    from sim.fleet import pool_deployment

    if not pool.deployment and pool.gpu is None and pool.calibration is None:
        return own._replace(deployment=pool_deployment(own.deployment, pool))
    return priced(config, pool_deployment(config.deployment, pool), pool.gpu, pool.calibration)


def _parquet(requests: Any) -> bytes:
    import pyarrow.parquet as pq

    content = BytesIO()
    pq.write_table(requests, content, compression="zstd")
    return content.getvalue()
