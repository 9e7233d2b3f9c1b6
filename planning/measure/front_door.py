"""Rung 6, the front door: what a real client saw, and what a client of the simulated server sees.

Same arrivals, same engine: once alone, as every rung below simulates it, and once behind the API server. Repeats of the
real run give the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from planning.scenario import Scenario
from serving.errors import UserError
from serving.front_door import FrontDoor
from sim.cluster import Cluster
from sim.run_log import TableSink
from traces.measured.recorded_client import RecordedClient
from traces.recording import Recording
from traces.run_metrics import RunMetrics

LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p99")
RATES = ("request_throughput", "output_throughput")


@dataclass(frozen=True)
class Row:
    """One statistic: as clients saw it, and as simulated without and with the front door."""

    metric: str
    statistic: str
    real: float
    engine_alone: float
    simulated: float
    floor_pct: float | None

    @property
    def error_pct(self) -> float:
        """Of what was simulated with the front door, in percent of the real; a wrong zero is 100 % off."""
        if self.real == 0:
            return 100.0 * (self.simulated != 0)
        return 100 * (self.simulated - self.real) / self.real

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error_pct": self.error_pct}


def hold_against_clients(clients: Sequence[Path], scenario: dict[str, Any], front_door: FrontDoor) -> list[Row]:
    """Every statistic of what `clients` recorded of one workload, and of two simulations of it.

    `scenario` has the fields of a `Scenario` but for the workload. Raises UserError for recordings of different ones.
    """
    runs = RecordedClient(folders=tuple(str(path.absolute()) for path in clients)).read(Path())
    sent = [[(request.id, request.arrival_ns) for request in run.workload.requests] for run in runs]
    for path, requests in zip(clients, sent, strict=True):
        if requests != sent[0]:
            raise UserError("client", str(path), f"served other requests than {clients[0]}; give repeats of one run")
    real = [_numbers(RunMetrics.of(Recording.load(path))) for path in clients]
    priced = Scenario.model_validate({**scenario, "workload": {"trace": str(clients[0])}}).priced()
    priced = replace(priced, workload=runs[0].workload)
    alone, behind = TableSink(), TableSink()
    priced.cluster(Cluster, alone, tokens=True).run(priced.workload)
    priced.cluster(Cluster, TableSink(), tokens=True, front_door=front_door, clients=behind).run(priced.workload)
    without, simulated = (_numbers(RunMetrics(sink.requests)) for sink in (alone, behind))
    rows = []
    for name, value in simulated.items():
        measured = [numbers[name] for numbers in real]
        centre = mean(measured)
        floor = 100 * (max(measured) - min(measured)) / centre if len(measured) > 1 and centre else None
        rows.append(Row(*name, centre, without[name], value, floor))
    return rows


def _numbers(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    distributions = {name: metrics.distribution(name).as_dict() for name in LATENCIES}
    numbers = {
        (name, statistic): float(distributions[name][statistic]) for name in LATENCIES for statistic in STATISTICS
    }
    scalars = metrics.scalars()
    return numbers | {(name, "value"): float(scalars[name]) for name in RATES if scalars[name] is not None}
