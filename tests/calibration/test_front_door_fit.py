"""Fitting a front door: known prices are recovered from a simulation with them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.calibration.test_calibration import fitted, measured
from tokentwin.calibration.front_door_fit import fit_front_door
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.step_cost import StepCost
from tokentwin.serving.cost_model import CostModel, TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter

US, MS = 1000, 1_000_000
TRUE = FrontDoor(
    client_ns=2 * MS, request_ns=300 * US, prompt_token_ns=2 * US, outputs_ns=90 * US, chunk_ns=70 * US, last_ns=9 * US
)


class Called:
    """A sink that keeps the names that clients gave their requests."""

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self.add_steps = writer.add_steps

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._writer.add_requests({**columns, "client_id": [f"c-{id}" for id in columns["request_id"]]})


def recorded(
    folder: Path, count: int, cost: CostModel = TokenCost(5 * MS, US, 1), door: FrontDoor = TRUE
) -> tuple[Recording, Recording]:
    """Return the recordings of a simulated server and of its client."""
    requests = [WorkloadRequest(at, at * 2 * MS, ((PRIVATE, 20 + 37 * at % 900),), 4 + at % 9) for at in range(count)]
    with RecordingWriter(folder / "served", {"run_id": "s"}) as server, RecordingWriter(
        folder / "client", {"run_id": "c"}
    ) as client:  # fmt: skip
        deployment = Deployment(scheduler=SchedulerConfig(max_num_seqs=32, num_blocks=5000))
        sinks = {"sink": Called(server), "clients": Called(client)}
        Cluster(deployment, cost, tokens=True, front_door=door, **sinks).run(Workload(requests))
    return Recording.load(folder / "served"), Recording.load(folder / "client")


def test_known_prices_are_found_again(tmp_path: Path) -> None:
    fitted = fit_front_door(*recorded(tmp_path, 200))
    for name in ("client_ns", "request_ns", "prompt_token_ns", "outputs_ns", "chunk_ns", "last_ns"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.03), name
    assert (fitted.engine_step_ns, fitted.engine_row_ns) == (0, 0)
    assert fitted.source == "200 requests of served, sent by client"


def test_of_a_server_that_only_its_scheduler_recorded_clients_tell_the_rest(tmp_path: Path) -> None:
    server, client = recorded(tmp_path, 200)
    requests = server.requests
    of_scheduler = {"queued_ns": requests["arrival_ns"], "arrival_ns": requests["received_ns"]}
    unknown = ("received_ns", "first_text_ns", "first_sent_ns", "last_text_ns", "last_sent_ns")
    for name, times in (of_scheduler | dict.fromkeys(unknown, pa.nulls(200, pa.int64()))).items():
        requests = requests.set_column(requests.column_names.index(name), requests.schema.field(name), times)
    pq.write_table(requests, server.path / "requests.parquet")
    fitted = fit_front_door(Recording.load(server.path), client)
    for name in ("request_ns", "prompt_token_ns", "chunk_ns"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    way_ns = TRUE.client_ns + TRUE.outputs_ns  # to the server and back: of two clocks only the sum is known
    assert fitted.client_ns + fitted.outputs_ns == pytest.approx(way_ns, rel=0.05)


def slowed(server: Recording, own: float, speed: float) -> Recording:
    """Return the recording of a machine at this speed whose thread got a share `own` of the wall time."""
    steps = server.steps
    wall_ns = steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy()
    for name, values in (
        ("thread_ns", pa.array((own * wall_ns).astype(np.int64))),
        ("speed", pa.array(np.full(len(wall_ns), speed))),
    ):
        steps = steps.set_column(steps.column_names.index(name), steps.schema.field(name), values)
    pq.write_table(steps, server.path / "steps.parquet")
    return Recording.load(server.path)


def test_what_an_engine_loses_beside_an_api_process_is_found(tmp_path: Path) -> None:
    calibration = fitted(measured(noise=0.0))
    known = {"engine_step_ns": 500 * US, "engine_row_ns": 30 * US, "host_step_ns": 400 * US, "host_row_ns": 20 * US}
    server, client = recorded(tmp_path, 60, StepCost(calibration), TRUE.model_copy(update=known))
    blind = fit_front_door(server, client, calibration)
    for name, true in known.items():
        assert getattr(blind, name) == pytest.approx(true, rel=0.02), name
    # Others had 1.5 times as much of the steps as while it was calibrated, on a machine half as fast.
    machine = MachineSlowdown(taken=1.25, speed=2.0, exponent=1.0)
    slower = slowed(server, own=1 / 1.5, speed=1.0)
    slow_door = fit_front_door(slower, client, replace(calibration, weather=machine))
    lost_ns = (server.steps["end_ns"].to_numpy() - server.steps["start_ns"].to_numpy()).mean() * (1 - 1.25 / 1.5) / 2
    rows = server.steps["sampled_rows"].to_numpy().mean()
    assert slow_door.engine_step_ns + slow_door.engine_row_ns * rows == pytest.approx(lost_ns, rel=0.02)


def test_too_few_requests_teach_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 10 are needed"):
        fit_front_door(*recorded(tmp_path, 5))
