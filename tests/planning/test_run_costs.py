"""The cost of a run: each pool's GPU hours at its price."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner, Result

from tests.traces.test_run_metrics import finished, requests_table
from tokentwin.cli import cli
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics, cost_usd
from tokentwin.traces.recording import Recording

H = 3_600 * 10**9
COSTS = ("cost_usd", "usd_per_hour", "usd_per_mtok_out", "usd_per_mtok_in", "usd_per_mtok_total")


def life(pool: str, gpus: int, started: float, ended: float | None) -> dict[str, Any]:
    end = None if ended is None else round(ended * H)
    return {"pool": pool, "gpus": gpus, "started_ns": round(started * H), "ready_ns": None, "ended_ns": end}


LIVES = [life("a", 2, 0, None), life("a", 2, 0.5, 0.75), life("b", 4, 0, 0.25)]


def test_what_was_there_is_paid_for_whether_it_was_ready_or_not() -> None:
    assert cost_usd(LIVES, H, {"a": 2.0, "b": 10.0}) == pytest.approx(2 * 2.0 * 1.25 + 4 * 10.0 * 0.25)


def test_a_price_that_is_not_known_is_not_nothing() -> None:
    assert cost_usd(LIVES, H, {"a": 2.0, "b": None}) is cost_usd(LIVES, H, {"a": 2.0}) is None
    assert cost_usd(LIVES[:2], H, {"a": 2.0, "b": None}) == pytest.approx(5.0)
    assert cost_usd(LIVES, H, {"a": 0.0, "b": 0.0}) == 0.0


def test_tokens_cost_what_the_fleet_does_while_it_makes_them() -> None:
    run = {"replica_lives": LIVES, "duration_ns": H, "usd_per_gpu_hour": {"a": 2.0, "b": 10.0}}
    found = RunMetrics(requests_table([finished(0, 0, 500, 1000, 30)]), run=run).scalars()
    assert (found["cost_usd"], found["usd_per_hour"]) == (pytest.approx(15.0), pytest.approx(15.0))
    for name, tokens in zip(COSTS[2:], (30, 10, 40), strict=True):  # in its one second
        assert found[name] == pytest.approx(15.0 / 3600 / tokens * 1e6)
    half = RunMetrics(requests_table([]), run={**run, "duration_ns": H // 2}).scalars()
    assert half["usd_per_hour"] == pytest.approx(2 * half["cost_usd"]) and half["usd_per_mtok_out"] is None
    assert RunMetrics(requests_table([]), run=run | {"usd_per_gpu_hour": None}).scalars()["cost_usd"] is None


def simulate(folder: Path, *arguments: object, **fleet: Any) -> Result:
    spec = {"requests": 40, "arrivals": {"kind": "poisson", "rate": 20}, "prompt": 200, "output": 20}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    (folder / "d.yaml").write_text(
        yaml.safe_dump({"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9, **fleet})
    )
    run = CliRunner().invoke
    words = ["trace", "synth", folder / "t.parquet", "--spec", folder / "spec.yaml", "--force"]
    run(cli, [str(word) for word in words], catch_exceptions=False)
    words = [
        "simulate",
        folder / "t.parquet",
        "-d",
        folder / "d.yaml",
        "--gpu",
        "H100",
        "-o",
        folder / "run",
        *arguments,
    ]
    return run(cli, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)


def test_a_simulated_run_says_what_it_costs(tmp_path: Path) -> None:
    pools = [{"name": "fast"}, {"name": "cheap", "gpu": "L40S", "replicas": 2}]
    told = json.loads(simulate(tmp_path, "--price", "L40S=0.5", "--format", "json", fleet={"pools": pools}).stdout)
    usd_per_hour = find_gpu("H100").usd_per_hour + 2 * 0.5
    assert told["usd_per_hour"] == pytest.approx(usd_per_hour)
    assert told["usd_per_mtok_out"] == pytest.approx(usd_per_hour / told["output_throughput"] / 3600 * 1e6)
    recording = Recording.load(tmp_path / "run")
    assert dict(recording.run["usd_per_gpu_hour"]) == {"fast": find_gpu("H100").usd_per_hour, "cheap": 0.5}
    assert {name: RunMetrics.from_recording(recording).scalars()[name] for name in COSTS} == {
        name: told[name] for name in COSTS
    }
    assert "usd_per_mtok_out" in simulate(tmp_path, "--force", "--no-band").stdout


def test_a_price_of_what_is_not_simulated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"H200.*is not in the simulated fleet; give prices for H100$"):
        simulate(tmp_path, "--price", "H200=3")
    with pytest.raises(UserError, match=r"H100.*must be GPU=DOLLARS"):
        simulate(tmp_path, "--price", "H100")


def test_a_recording_from_before_prices_opens_and_has_none(tmp_path: Path) -> None:
    simulate(tmp_path, "--no-band")
    runs = tmp_path / "run" / "runs.parquet"
    table = pq.read_table(runs)
    pq.write_table(table.drop_columns(["usd_per_gpu_hour"]), runs)
    metrics = RunMetrics.from_recording(Recording.load(tmp_path / "run")).scalars()
    assert metrics["gpu_hours"] > 0 and metrics["cost_usd"] is None
