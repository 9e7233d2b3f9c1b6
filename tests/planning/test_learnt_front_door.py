"""The front door of a learnt twin in every command that takes the twin as its calibration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import tokentwin
from tests.planning.learn_servers import GPU, server
from tokentwin.calibration.steps.external_calibration import blind
from tokentwin.planning.learn.front_door import learnt_front_door
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

DOOR = FrontDoor(client_ns=6e6, request_ns=1e6, outputs_ns=5e6, source="tokentwin learn of http://x, 2026-11-27")
TRAFFIC = "requests: 60\nseed: 1\narrivals: {kind: poisson, rate: 4}\nprompt: {kind: fixed, tokens: 300}\n"
OUTSIDE = "latencies are those that clients see: a lone request takes 12.0 ms outside the engine"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a twin, beside traffic and the same calibration as `calibrate` writes it."""
    home = tmp_path_factory.mktemp("learnt")
    deployment = server().deployment
    known = replace(blind(GPU, deployment), gpu=GPU, source="tokentwin learn of http://x", created="2026-11-27")
    for name in ("twin", "calibrated"):
        known.save(home / name)
        DOOR.save(home / name)
    (home / "twin" / "learnt.json").write_text("{}")
    (home / "served.json").write_text(deployment.model_dump_json(exclude_unset=True))
    (home / "traffic.yaml").write_text(TRAFFIC + "output: {kind: fixed, tokens: 40}\n")
    return home / "twin"


def run(twin: Path, *words: str, calibration: str = "twin") -> str:
    done = tokentwin(*words, "-c", calibration, "-d", "served.json", cwd=twin.parent)
    assert done.returncode in (0, 3), done.stderr
    return str(done.stdout)


def ttft_ms(folder: Path) -> float:
    return RunMetrics.from_recording(Recording.load(folder)).distribution("ttft_ms").mean


def test_only_a_learnt_twin_brings_its_front_door(twin: Path) -> None:
    calibrated = twin.parent / "calibrated"
    assert learnt_front_door(None) is learnt_front_door("mine.py:Cost") is learnt_front_door(str(calibrated)) is None
    assert learnt_front_door(str(twin)) == DOOR.model_copy(update={"learnt": True})
    scenario = price_scenario(
        Workload([WorkloadRequest(0, 0, ((PRIVATE, 300),), 4)]), str(twin), None, Deployment.model_validate_json(
            (twin.parent / "served.json").read_text()
        )
    )  # fmt: skip
    behind, alone = scenario.requests().to_pylist()[0], replace(scenario, front_door=None).requests().to_pylist()[0]
    assert behind["first_token_ns"] - behind["arrival_ns"] == alone["first_token_ns"] - alone["arrival_ns"] + 12_000_000


def test_simulate_and_diagnose_have_the_latencies_of_clients(twin: Path) -> None:
    home = twin.parent
    said = run(twin, "simulate", "traffic.yaml", "-o", "seen")
    assert f"{OUTSIDE} (tokentwin learn of http://x, 2026-11-27)" in said
    plain = run(twin, "simulate", "traffic.yaml", "-o", "alone", calibration="calibrated")
    assert OUTSIDE not in plain
    assert ttft_ms(home / "seen") == pytest.approx(ttft_ms(home / "alone") + 12, abs=1)
    same = tokentwin(
        *("simulate", "traffic.yaml", "-c", "calibrated", "-d", "served.json", "--front-door", "twin", "-o", "same"),
        *("--no-band", "--format", "json"),
        cwd=home,
    )
    assert OUTSIDE in json.loads(same.stdout)["seen_by"]
    assert ttft_ms(home / "same") == ttft_ms(home / "seen")
    found = tokentwin("diagnose", "seen", "-c", "twin", "--format", "json", cwd=home)
    assert found.returncode == 0 and "simulated again" not in found.stdout, found.stderr


def test_plan_and_compare_have_the_latencies_of_clients(twin: Path) -> None:
    words = ("plan", "traffic.yaml", "--slo", "ttft_ms p90<=200", "-j", "1")
    plans = {name: run(twin, *words, calibration=name) for name in ("twin", "calibrated")}
    assert OUTSIDE in plans["twin"] and OUTSIDE not in plans["calibrated"]
    seen, alone = (float(plans[name].split("p90<=200 (")[1].split(" ms")[0]) for name in ("twin", "calibrated"))
    assert seen == pytest.approx(alone + 12, abs=1)
    compared = run(twin, "compare", "--trace", "traffic.yaml", "--b", "max_num_seqs=4")
    assert compared.count(OUTSIDE) == 1


def test_a_twin_without_its_front_door_is_one_line(twin: Path, tmp_path: Path) -> None:
    (tmp_path / "learnt.json").write_text("{}")
    (tmp_path / "engine.json").write_bytes((twin / "engine.json").read_bytes())
    for broken in (None, "{", '{"client_ns": -1}'):
        if broken is not None:
            (tmp_path / "front_door.json").write_text(broken)
        done = tokentwin("plan", twin.parent / "traffic.yaml", "--slo", "ttft_ms p90<=200", "-c", tmp_path)
        assert done.returncode == 2 and "learn the server again" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
