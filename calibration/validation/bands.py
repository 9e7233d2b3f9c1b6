"""90 % bands on what a simulation reports.

How long a whole run's steps take is uncertain by a factor that all of them share; errors of single steps average out.
So the run is simulated again with every step at the lower and at the upper end of the interval. Queueing makes of a few
percent in service what it makes of them: near saturation the band opens by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from serving.cost_model import CostModel
from serving.deployments.config import Deployment
from serving.deployments.fleet import FleetConfig
from serving.workload import Workload
from sim.cluster import Cluster
from sim.priced_pool import PricedPool
from sim.router import Router
from sim.run_log import TableSink
from traces.run_metrics import RunMetrics

BAND_STATS = ("mean", "p50", "p90", "p95", "p99")
Band = tuple[float, float]


def run_metrics(
    workload: Workload,
    deployment: Deployment,
    cost: CostModel,
    replicas: int = 1,
    router: Callable[[], Router] | None = None,
    fleet: FleetConfig | None = None,
    pools: Sequence[PricedPool] | None = None,
) -> RunMetrics:
    """The metrics of a simulated run of which nothing else is kept; see `sim.cluster.Cluster` for what is simulated."""
    sink = TableSink()
    Cluster(
        deployment,
        cost,
        sink,
        replicas=replicas,
        router=router() if router else None,
        fleet=fleet,
        pools=pools,
        shares_prefixes=workload.shares_prefixes,
        steps=False,
    ).run(workload)
    return RunMetrics(sink.requests)


def bands(central: RunMetrics, fast: RunMetrics, slow: RunMetrics) -> dict[str, dict[str, Band]]:
    """The band of every statistic of every latency, and of the throughputs under `value`.

    A band spans the three simulations: what is in the middle need not come out between the ends.
    """
    return _bands((central, fast, slow), outside=0)


def drawn_bands(runs: Sequence[RunMetrics]) -> dict[str, dict[str, Band]]:
    """The same of `runs` that were each drawn: without a twentieth of them at either end."""
    return _bands(runs, outside=len(runs) // 20)


def _bands(runs: Sequence[RunMetrics], outside: int) -> dict[str, dict[str, Band]]:
    central = runs[0]
    found: dict[str, dict[str, Band]] = {}
    for name, summary in central.distributions().items():
        if summary.count and all(run.distribution(name).count for run in runs):
            numbers = [run.distribution(name).as_dict() for run in runs]
            found[name] = {stat: _span([n[stat] for n in numbers], outside) for stat in BAND_STATS}
    scalars: list[Mapping[str, object]] = [run.scalars() for run in runs]
    for name in ("request_throughput", "output_throughput", "total_throughput"):
        values = [s[name] for s in scalars]
        if all(isinstance(value, float) for value in values):
            found[name] = {"value": _span([float(str(value)) for value in values], outside)}
    return found


def _span(values: list[float], outside: int) -> Band:
    ordered = sorted(values)
    return ordered[outside], ordered[-1 - outside]
