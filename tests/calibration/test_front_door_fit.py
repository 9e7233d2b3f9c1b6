"""Fitting a front door: what is simulated with known prices is found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from calibration.front_door_fit import fit_front_door
from serving.cost_model import TokenCost
from serving.deployments.config import Deployment, SchedulerConfig
from serving.errors import UserError
from serving.front_door import FrontDoor
from serving.workload import PRIVATE, Workload, WorkloadRequest
from sim.cluster import Cluster
from traces.recording import Recording, RecordingWriter

US, MS = 1000, 1_000_000
TRUE = FrontDoor(
    client_ns=2 * MS, request_ns=300 * US, prompt_token_ns=2 * US, outputs_ns=90 * US, chunk_ns=70 * US, last_ns=9 * US
)


class Called:
    """A sink whose requests have the names that a client gave them."""

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer
        self.add_steps = writer.add_steps

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._writer.add_requests({**columns, "client_id": [f"c-{id}" for id in columns["request_id"]]})


def recorded(folder: Path, count: int) -> tuple[Recording, Recording]:
    """A server and its client, simulated."""
    requests = [WorkloadRequest(at, at * 2 * MS, ((PRIVATE, 20 + 37 * at % 900),), 4 + at % 9) for at in range(count)]
    with RecordingWriter(folder / "served", {"run_id": "s"}) as server, RecordingWriter(
        folder / "client", {"run_id": "c"}
    ) as client:  # fmt: skip
        deployment = Deployment(scheduler=SchedulerConfig(max_num_seqs=32, num_blocks=5000))
        sinks = {"sink": Called(server), "clients": Called(client)}
        Cluster(deployment, TokenCost(5 * MS, US, 1), tokens=True, front_door=TRUE, **sinks).run(Workload(requests))
    return Recording.load(folder / "served"), Recording.load(folder / "client")


def test_known_prices_are_found_again(tmp_path: Path) -> None:
    found = fit_front_door(*recorded(tmp_path, 200))
    for name in ("client_ns", "request_ns", "prompt_token_ns", "outputs_ns", "chunk_ns", "last_ns"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.03), name
    assert (found.engine_step_ns, found.engine_row_ns) == (0, 0)
    assert found.source == "200 requests of served, sent by client"


def test_too_few_requests_teach_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 10 are needed"):
        fit_front_door(*recorded(tmp_path, 5))
