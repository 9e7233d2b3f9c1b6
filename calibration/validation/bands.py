"""90 % bands on the results of a simulation.

The step times of a run are uncertain by one factor for all steps; errors of single steps average out. The run is
therefore simulated again with all step times at the lower and at the upper end of their interval. Queueing amplifies
errors of step times, so the band is wide near saturation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.fleet import PricedPool
from tokentwin.sim.router import Router
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.tables import Distribution

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
    """Simulate a run and return its metrics; its recording is not kept.

    See `tokentwin.sim.cluster.Cluster` for the arguments.
    """
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


def bands(central: RunMetrics, ends: Iterable[RunMetrics]) -> dict[str, dict[str, Band]]:
    """Return the band of each latency's statistics, and of each throughput (under the name `value`).

    A band covers the values of the centre and of both ends, because the centre is not always between the ends. If
    `ends` is a generator, only one of its runs is in memory at a time.
    """
    return _bands(chain((central,), ends), outside=0)


def drawn_bands(runs: Sequence[RunMetrics]) -> dict[str, dict[str, Band]]:
    """Return the 90 % bands over randomly drawn `runs`: 5 % of the runs are left out at either end."""
    return _bands(runs, outside=len(runs) // 20)


def _bands(runs: Iterable[RunMetrics], outside: int) -> dict[str, dict[str, Band]]:
    statistics = list(map(_figures, runs))
    bands: dict[str, dict[str, Band]] = {}
    for name in statistics[0][0]:
        if all(distributions[name].count for distributions, _ in statistics):
            numbers = [distributions[name].as_dict() for distributions, _ in statistics]
            bands[name] = {stat: _span([n[stat] for n in numbers], outside) for stat in BAND_STATS}
    scalars = [of_run for _, of_run in statistics]
    for name in ("request_throughput", "output_throughput", "total_throughput"):
        values = [s[name] for s in scalars]
        if all(isinstance(value, float) for value in values):
            bands[name] = {"value": _span([float(str(value)) for value in values], outside)}
    return bands


def _figures(run: RunMetrics) -> tuple[dict[str, Distribution], dict[str, Any]]:
    return run.distributions(), run.scalars()


def _span(values: list[float], outside: int) -> Band:
    ordered = sorted(values)
    return ordered[outside], ordered[-1 - outside]
