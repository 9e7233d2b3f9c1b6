"""Several real engines behind a router of the simulator's: each a process, one recording, every decision made again."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.planning.sweep_samples import calibrated
from tests.serving.test_clients import conversations
from tokentwin import api
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.decision_replay import recorded_deployment, replay_decisions, replay_routes
from tokentwin.commands.bench import bench
from tokentwin.planning.compare.comparer import compare_on_engine
from tokentwin.planning.compare.request import CompareRequest
from tokentwin.planning.measure.engine_fleet import EngineFleet
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.realengine.parallel.replica_process import ReplicaProcess
from tokentwin.realengine.parallel.replica_replay import start_replica
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

pytestmark = pytest.mark.engine

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 60, "block_size": 4}
ALONE = Deployment(model="random:llama", dtype="float32", scheduler=SchedulerConfig(**SETTINGS))


def deployed(**fleet: Any) -> Deployment:
    return ALONE.model_copy(update={"fleet": FleetConfig(**{"pools": (PoolConfig(replicas=2),), **fleet})})


def traffic(requests: int = 40, **arrivals: Any) -> Workload:
    """Requests that come far faster than they can be served, one that never fits, and clients of which some hang up."""
    spec = {
        "name": "x",
        "seed": 3,
        "requests": requests,
        "arrivals": arrivals or {"kind": "poisson", "rate": 300},
        "prompt": {"kind": "lognormal", "mean": 40, "sigma": 0.8, "max": 100},
        "output": {"kind": "lognormal", "mean": 12, "sigma": 0.8, "max": 60},
        "system_prompts": {"count": 3, "tokens": {"kind": "fixed", "tokens": 24}},
    }
    made = synthesise(parse_spec(spec, where="x"))
    hang_up = [replace(r, cancel_ns=r.arrival_ns + 4_000_000) if r.id % 9 == 0 else r for r in made.requests]
    too_long = [replace(r, output_len=300) if r.id == 5 else r for r in hang_up]
    return replace(made, requests=too_long)


def start(number: int, deployment: Deployment, gpus: str | None) -> ReplicaProcess:
    return start_replica(number, deployment, load_model_files("random:llama", Path()), None, gpus)


@pytest.fixture(scope="module")
def fleet() -> Iterator[EngineFleet]:
    made = EngineFleet(deployed(), start)
    yield made
    made.close()


@pytest.mark.parametrize("router", ["power-of-two", "least-tokens", "kv-aware", "prefix-affinity"])
def test_every_decision_is_made_again(router, fleet, tmp_path, monkeypatch):
    """Each engine's steps, and each choice of the router by what it had heard by then."""
    of_router = deployed(router=RouterConfig(name=router))
    monkeypatch.setattr(fleet, "deployment", of_router)
    done = fleet.record(traffic(), tmp_path / "run")
    assert done.status == "complete"
    recording = Recording.load(tmp_path / "run")
    assert recording.run["replicas"] == len(recording.run["replica_lives"]) == 2
    requests = {row["request_id"]: row for row in recording.requests.to_pylist()}
    assert len(requests) == 40
    assert {row["replica"] for row in requests.values()} == {0, 1}
    assert {row["status"] for row in requests.values()} == {"finished", "cancelled", "rejected"}
    assert done.finished == sum(row["status"] == "finished" for row in requests.values())
    assert all(row["heard_ns"] >= (row["end_ns"] or row["queued_ns"]) for row in requests.values())
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical == replay.steps > 20
    assert replay.identical_requests == replay.requests == 40
    assert replay.identical_routes == replay.routes == 40
    other = deployed(router=RouterConfig(name="random"))
    assert replay_routes(recording, other).first_difference is not None


def test_a_fleet_is_calibrated_simulated_and_compared(fleet: EngineFleet, tmp_path: Path) -> None:
    fleet.record(traffic(80), tmp_path / "real")
    api.calibrate(out=tmp_path / "calibration", recordings=[tmp_path / "real"])
    report = api.validate([tmp_path / "real"], tmp_path / "calibration", tmp_path / "report")
    assert report.rungs.replay is not None and report.rungs.replay.exact
    assert report.rungs.replay.identical_routes == 80
    assert {row.metric for row in report.rungs.run.rows} >= {"ttft_ms", "tpot_ms", "e2e_ms"}
    simulated = Recording.load(tmp_path / "report" / "simulated").requests
    assert set(simulated["replica"].to_pylist()) == {0, 1}


@pytest.mark.parametrize("router", ["round-robin", "session-sticky"])
def test_the_turns_of_a_conversation_go_where_the_router_sends_them(router, fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "deployment", deployed(router=RouterConfig(name=router)))
    fleet.record(conversations(None), tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    rows = recording.table("requests", ["session", "replica"]).to_pylist()
    if router == "session-sticky":
        assert len({(row["session"], row["replica"]) for row in rows}) == 4
    else:
        assert sorted(row["replica"] for row in rows) == [0] * 6 + [1] * 6
    assert replay.identical_routes == len(rows) == 12


def test_what_a_router_had_not_heard_of_it_does_not_know(fleet: EngineFleet, tmp_path: Path) -> None:
    """Ends of which it never hears are load that stays: in a closed loop every request follows one."""
    router = RouterConfig(name="least-requests")
    fleet.deployment = fleet.deployment.model_copy(update={"fleet": deployed(router=router).fleet})
    fleet.record(traffic(kind="closed", concurrency=4), tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    assert replay_routes(recording, fleet.deployment).identical == 40
    table = recording.requests
    at = table.schema.get_field_index("heard_ns")
    heard = zip(table["heard_ns"].to_pylist(), table["replica"].to_pylist(), strict=True)
    late = pa.array([ns + 10**12 * (replica == 0) for ns, replica in heard], pa.int64())
    pq.write_table(table.set_column(at, table.schema.field(at), late), tmp_path / "run" / "requests.parquet")
    assert replay_routes(Recording.load(tmp_path / "run"), fleet.deployment).identical < 40


def test_ctrl_c_ends_all_of_them_and_keeps_what_there_is(fleet: EngineFleet, tmp_path: Path) -> None:
    def progress(ended: int) -> None:
        if ended == 15:
            os.kill(os.getpid(), signal.SIGINT)

    done = fleet.record(traffic(100), tmp_path / "run", progress=progress)
    assert done.status == "interrupted"
    recording = Recording.load(tmp_path / "run")
    assert recording.run["status"] == "interrupted"
    assert 0 < done.finished < 100
    assert "unfinished" in recording.requests["status"].to_pylist()
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference


@pytest.fixture
def made(fleet: EngineFleet, monkeypatch: pytest.MonkeyPatch) -> list[Deployment]:
    """Whoever loads a fleet gets the one that is there; what it was to be."""
    wanted: list[Deployment] = []

    def load(deployment: Deployment, *files: object) -> EngineFleet:
        wanted.append(deployment)
        fleet.deployment = deployment
        return fleet

    monkeypatch.setattr("tokentwin.planning.measure.engine_fleet.EngineFleet", load)
    monkeypatch.setattr(fleet, "close", lambda: None)
    return wanted


def test_bench_runs_them(made: list[Deployment], tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("{requests: 8, arrivals: {kind: poisson, rate: 50}, prompt: 8, output: 3}")
    (tmp_path / "alone.yaml").write_text(ALONE.model_dump_json())
    options = ["-d", str(tmp_path / "alone.yaml"), "--replicas", "2", "--router", "least-requests"]
    done = CliRunner().invoke(bench, [str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "run"), *options])
    assert done.exit_code == 0, done.output
    recording = Recording.load(tmp_path / "run")
    assert replay_decisions(recording).identical_routes == 8
    assert made == [recorded_deployment(recording)] == [deployed(router=RouterConfig(name="least-requests"))]


def test_routers_are_compared_on_real_engines(made: list[Deployment], tmp_path: Path) -> None:
    invented = replace(Calibration.load(calibrated(tmp_path)), deployment=ALONE.model_dump_json())
    invented.save(tmp_path)
    sides = ({"replicas": 2}, {"replicas": 2, "router": "least-tokens"})
    traffic = {"requests": 30, "arrivals": {"kind": "poisson", "rate": 100}, "prompt": 20, "output": 8}
    asked = {"traffic": traffic, "timing": {"calibration": str(tmp_path)}, "a": sides[0], "b": sides[1]}
    answer = compare_on_engine(CompareRequest.model_validate(asked), tmp_path / "real")
    assert answer.simulated is not None and answer.ranking is not None
    for name, router in (("a", "round-robin"), ("b", "least-tokens")):
        recording = Recording.load(tmp_path / "real" / name / "run-1")
        assert recorded_deployment(recording) == deployed(router=RouterConfig(name=router))
        assert replay_decisions(recording).identical_routes == 30
    assert len(made) == 3


def test_with_several_seeds_each_real_run_has_the_traffic_of_one(made: list[Deployment], tmp_path: Path) -> None:
    invented = replace(Calibration.load(calibrated(tmp_path)), deployment=ALONE.model_dump_json())
    invented.save(tmp_path)
    traffic = {"requests": 12, "arrivals": {"kind": "poisson", "rate": 100}, "prompt": 20, "output": 4}
    sides = {"a": {"replicas": 2}, "b": {"replicas": 2, "router": "least-tokens"}}
    request = CompareRequest.model_validate(
        {"traffic": traffic, "timing": {"calibration": str(tmp_path)}, "seeds": 3, **sides}
    )
    answer = compare_on_engine(request, tmp_path / "real")
    assert (answer.runs, answer.requests) == (3, 36)
    assert answer.simulated is not None and answer.simulated.runs == 3
    for number in (1, 2, 3):
        a, b = (Recording.load(tmp_path / "real" / side / f"run-{number}") for side in "ab")
        arrivals = [[one.arrival_ns for one in run.workload().requests] for run in (a, b)]
        assert arrivals == [[one.arrival_ns for one in request.workload(number - 1).requests]] * 2
    with pytest.raises(UserError, match="repeats: 2: must be 1 with 3 seeds"):
        compare_on_engine(request, tmp_path / "again", repeats=2)
    with pytest.raises(UserError, match=r"run-3.: is a run of another comparison"):
        compare_on_engine(request.model_copy(update={"seeds": 2}), tmp_path / "real", overwrite=True)


def test_what_only_the_simulator_can_run_is_refused() -> None:
    for given, says in (
        ({"pools": (PoolConfig(name="a"), PoolConfig(name="b"))}, "one pool"),
        ({"pools": (PoolConfig(speed=2.0),)}, "fleet.pools.pool.speed"),
        ({"autoscaler": {"target": 1, "max_replicas": 2}}, "fleet.autoscaler"),
        ({"router": "no-such"}, "router"),
    ):
        with pytest.raises(UserError, match=says):
            EngineFleet(deployed(**given), start)
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        EngineFleet(deployed().model_copy(update={"gpu_memory_utilization": 0.5}), start)


def test_the_end_of_an_engine_is_one_line(fleet: EngineFleet, tmp_path: Path) -> None:
    """The last test: nothing follows on that fleet."""
    fleet._engines[1]._process.kill()
    with pytest.raises(UserError, match="replica 1: 'lost': its engine was ended by signal 9"):
        fleet.record(traffic(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
