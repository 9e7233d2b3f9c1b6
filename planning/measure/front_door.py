"""Rung 6 of validation, the front door: latencies of a real client, compared with those of a simulated client.

The same arrivals are simulated twice: with the engine alone, as on every lower rung, and behind the API server. With
recordings of the servers, a third simulation behind the API server also has the machine's slowdown in each run. Repeats
of the real run give the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.compute as pc

from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.known_speed import machine_slowdown, slowed_fleet
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.scenario import Scenario
from tokentwin.serving.answers.report import CHANGE, METRIC, NUMBER, PERCENT, Column, Table
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.measured.recorded_client import RecordedClient, sent, spread_pct
from tokentwin.traces.measured.run import RATES, STATISTICS
from tokentwin.traces.metrics.client_view import matched
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True)
class Row:
    """One statistic as real clients saw it, and as simulated without and with the front door.

    Attributes:
        in_weather: value simulated with the front door and the machine's slowdown in the runs; None if it is not known
    """

    metric: str
    statistic: str
    real: float
    engine_alone: float
    simulated: float
    floor_pct: float | None
    in_weather: float | None = None

    @property
    def error_pct(self) -> float:
        """The error of the simulation with the front door, in percent of the real value; 100 if only that is 0."""
        return self._error_pct(self.simulated)

    @property
    def in_weather_error_pct(self) -> float | None:
        """The error of the simulation with the machine's slowdown in the runs, in percent of the real value."""
        return None if self.in_weather is None else self._error_pct(self.in_weather)

    def _error_pct(self, simulated: float) -> float:
        if self.real == 0:
            return 100.0 * (simulated != 0)
        return 100 * (simulated - self.real) / self.real

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error_pct": self.error_pct, "in_weather_error_pct": self.in_weather_error_pct}


def clients_table(rows: Sequence[Any], title: str = "") -> Table:
    """Return `rows`, or rows read from a saved document, as a table."""
    known = any(row.in_weather is not None for row in rows)
    columns = [
        Column("metric", METRIC),
        Column("statistic"),
        *(Column(name, NUMBER) for name in ("clients", "engine alone", "with the\nfront door")),
        Column("error", CHANGE),
        Column("noise", PERCENT),
        *((Column("speed\nknown", NUMBER, spare=1), Column("its error", CHANGE)) if known else ()),
    ]
    cells = []
    for row in rows:
        same = (row.in_weather, row.in_weather_error_pct) if known else ()
        numbers = (row.real, row.engine_alone, row.simulated, row.error_pct, row.floor_pct, *same)
        cells.append((row.metric, row.statistic, *numbers))
    return Table(columns, cells, title)


def hold_against_clients(
    clients: Sequence[Path], scenario: dict[str, Any], front_door: FrontDoor, servers: Sequence[Path] = ()
) -> list[Row]:
    """Return every statistic of the recordings `clients` of one workload, and of two simulations of the workload.

    `scenario` has the fields of a `Scenario` except the workload. `servers` are recordings of the real engines that
    served the clients, one for each client, in order. With them a third simulation has the machine's slowdown in each
    run. Raises UserError for recordings of different workloads, and for servers whose slowdown is not known.
    """
    runs = RecordedClient(folders=tuple(str(path.absolute()) for path in clients)).read(Path())
    for path, run in zip(clients, runs, strict=True):
        if sent(run) != sent(runs[0]):
            raise UserError("client", str(path), f"served other requests than {clients[0]}; give repeats of one run")
    real = [_numbers(RunMetrics.from_recording(Recording.load(path))) for path in clients]
    priced = Scenario.model_validate({**scenario, "workload": {"trace": str(clients[0])}}).priced()
    priced = replace(priced, workload=runs[0].workload, front_door=None)
    alone, behind = TableSink(), TableSink()
    priced.cluster(Cluster, alone, tokens=True).run(priced.workload)
    through = replace(priced, front_door=front_door)
    through.cluster(Cluster, TableSink(), tokens=True, clients=behind).run(priced.workload)
    without, simulated = (_numbers(RunMetrics(sink.requests)) for sink in (alone, behind))
    at_speed = _at_known_speed(clients, servers, priced, scenario["calibration"], front_door) if servers else []
    rows = []
    for name, value in simulated.items():
        measured = [numbers[name] for numbers in real]
        in_weather = mean(numbers[name] for numbers in at_speed) if at_speed else None
        rows.append(Row(*name, mean(measured), without[name], value, spread_pct(measured), in_weather))
    return rows


def _at_known_speed(
    clients: Sequence[Path],
    servers: Sequence[Path],
    priced: PricedScenario,
    calibration: str | None,
    front_door: FrontDoor,
) -> list[dict[tuple[str, str], float]]:
    """Return the numbers of each run, simulated with the machine's slowdown in that run.

    The slowdown includes the time that the engine loses to other processes, so the front door must not add it again.
    """
    if calibration is None:
        raise UserError("served", str(servers[0]), "needs the calibration of its engine; give it, too")
    if len(servers) != len(clients):
        raise UserError("served", len(servers), f"must be {len(clients)} recordings, one for each client, in order")
    engine, door = (
        Calibration.load(calibration),
        front_door.model_copy(update={"engine_step_ns": 0, "engine_row_ns": 0}),
    )
    numbers = []
    for client, server in zip(map(Recording.load, clients), map(Recording.load, servers), strict=True):
        if (machine := machine_slowdown([server], engine)) is None:
            raise UserError(
                "served", str(server.path), "does not tell the machine's speed, or its calibration does not"
            )
        served_rows, seen_rows = matched(server, client)
        begin_ns = pc.quantile(pc.subtract(served_rows.column("received_ns"), seen_rows.column("send_ns")), 0.5)[
            0
        ].as_py()
        failures = slowed_fleet(server, machine, begin_ns / 1e9).failures
        fleet = priced.fleet.model_copy(update={"failures": failures})
        slowed = replace(priced, deployment=priced.deployment.model_copy(update={"fleet": fleet}), front_door=door)
        seen = TableSink()
        slowed.cluster(Cluster, TableSink(), tokens=True, clients=seen).run(priced.workload)
        numbers.append(_numbers(RunMetrics(seen.requests)))
    return numbers


def _numbers(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    distributions = {name: metrics.distribution(name).as_dict() for name in LATENCIES}
    numbers = {
        (name, statistic): float(distributions[name][statistic]) for name in LATENCIES for statistic in STATISTICS
    }
    scalars = metrics.scalars()
    return numbers | {(name, "value"): float(scalars[name]) for name in RATES if scalars[name] is not None}
