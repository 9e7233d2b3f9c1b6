"""Sweeps that are made: the same bytes however they come about, and nothing lost or twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.command import tokentwin
from tests.planning.sweep_samples import SCHEDULER, base, calibrated, content, sweep_file
from tests.serving.test_contract import FAILING
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.planning.costs import priced
from tokentwin.planning.resolution import base_deployment
from tokentwin.planning.sweep.executors import Executor, find_executor, in_processes
from tokentwin.planning.sweep.one_run import DIED, OVERDUE, Measure, RunResult, failed
from tokentwin.planning.sweep.points import Point, points
from tokentwin.planning.sweep.settings import load_sweep
from tokentwin.planning.sweep.sweep import Sweep, Swept
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.traces.schema import arrow_schema
from tokentwin.traces.synth import parse_spec, synthesise

RATE = "workload.arrivals.rate"
GRID = {"deployment.policy": ["vllm", "fair"], RATE: [10, 40]}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("calibration"))


def here(measure: Callable[[Point], RunResult], points: Sequence[Point]) -> Generator[RunResult, None, None]:
    """Makes runs in this process, the last first."""
    yield from map(measure, reversed(points))


def swept(file: Path, out: Path, executor: Executor | None = None, **options: Any) -> Swept:
    return Sweep.from_settings(load_sweep(file)).run(out, executor or here, **options)


def rows(out: Path) -> pd.DataFrame:
    query = f"from read_parquet('{out}/runs/**/*.parquet', hive_partitioning = true) order by run_id"
    return duckdb.sql(query).df()


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A sweep's file and its dataset, requests and all metrics included."""
    here = tmp_path_factory.mktemp("sweep")
    file = sweep_file(here / "s.yaml", base(folder), grid=GRID, seeds=2, per_request=True, full_metrics=True)
    assert swept(file, here / "out") == Swept(made=8, kept=0, failed=0, first_error="")
    return file, here / "out"


def test_a_row_says_what_was_run_and_what_came_out(done: tuple[Path, Path], folder: Path) -> None:
    for row in rows(done[1]).to_dict("records"):
        config = json.loads(row["config"])
        assert (row["status"], row["calibration_id"], row["seed"]) == (
            "complete",
            "invented",
            config["workload"]["seed"],
        )
        workload = synthesise(parse_spec(config["workload"]))
        deployment = base_deployment(str(folder)).model_copy(update={"policy": row["policy"]})
        known = priced(str(folder), None, deployment)
        assert known.deployment == Deployment(policy=row["policy"], scheduler=SCHEDULER)
        metrics = run_metrics(workload, known.deployment, known.cost)
        assert row["ttft_ms_p99"] == metrics.distribution("ttft_ms").p99
        assert row["request_throughput"] == metrics.scalars()["request_throughput"]
        assert (row["requests_offered"], row["requests_finished"], row["kv_blocks"], row["gpus"]) == (30, 30, 399, 1)
        assert row["itl_ms_count"] == 30 * 19
        assert 0 < row["kv_usage"] <= row["kv_usage_peak"] <= 1


def test_others_read_it_as_it_is(done: tuple[Path, Path]) -> None:
    out = done[1]
    counts = duckdb.sql(f"select policy, count(*) from '{out}/runs/*/*.parquet' group by policy order by policy")
    assert counts.fetchall() == [("fair", 4), ("vllm", 4)]
    assert pl.scan_parquet(out / "runs").filter(pl.col("policy") == "fair").collect().height == 4
    assert len(pd.read_parquet(out / "runs", filters=[("policy", "==", "fair")])) == 4
    joined = duckdb.sql(
        f"""select r.run_id, count(*) as n, max(r.requests_offered) as requests
        from '{out}/requests/*/*.parquet' q join '{out}/runs/*/*.parquet' r using (run_id) group by all"""
    )
    assert joined.df()["n"].tolist() == [30] * 8
    (first, *_) = sorted((out / "requests").rglob("*.parquet"))
    assert pq.read_schema(first).remove_metadata() == arrow_schema("requests").remove_metadata()
    (first, *_) = sorted((out / "runs").rglob("*.parquet"))
    assert pq.read_schema(first).field("rate").metadata[b"path"] == RATE.encode()


def test_the_bytes_do_not_depend_on_jobs_or_order(done: tuple[Path, Path], tmp_path: Path) -> None:
    file, out = done
    swept(file, tmp_path / "two", partial(in_processes, jobs=2))
    assert content(tmp_path / "two") == content(out)


def test_the_ray_executor_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install"):
        find_executor("ray", None)


def test_more_values_and_seeds_extend_a_dataset(done: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    small = sweep_file(tmp_path / "s.yaml", base(folder), grid={"deployment.policy": ["vllm"], RATE: [40]}, seeds=1,
                       per_request=True, full_metrics=True)  # fmt: skip
    assert swept(small, tmp_path / "out").made == 1
    again = swept(done[0], tmp_path / "out", resume=True)
    assert (again.made, again.kept) == (7, 1)
    assert content(tmp_path / "out") == content(done[1])
    assert swept(done[0], tmp_path / "out", resume=True) == Swept(made=0, kept=8, failed=0, first_error="")
    assert content(tmp_path / "out") == content(done[1])


def test_another_sweep_is_refused(folder: Path, tmp_path: Path) -> None:
    one = sweep_file(tmp_path / "s.yaml", base(folder), grid={RATE: [10]})
    out = tmp_path / "out"
    swept(one, out)
    before = content(out)
    with pytest.raises(UserError, match="use --resume to continue"):
        swept(one, out)
    for changed, message in (
        ({"base": base(folder, requests=31), "grid": {RATE: [10]}}, "base.workload.requests: 31: was 30 in"),
        ({"base": base(folder), "grid": {RATE: [10.5]}}, "columns.rate: 'double': was int64"),
        ({"base": base(folder), "grid": {"replicas": [1]}}, "varied.replicas: 'replicas': was None"),
        ({"base": base(folder), "grid": {RATE: [10]}, "partition": [RATE]}, "partition: .*was \\[\\]"),
    ):
        with pytest.raises(UserError, match=message):
            swept(sweep_file(tmp_path / "other.yaml", **changed), out, resume=True)
    assert content(out) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds other files"):
        swept(one, tmp_path / "full", resume=True)


def test_a_changed_input_is_refused(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n")
    run = {"calibration": str(folder), "workload": {"trace": str(trace)}}
    file = sweep_file(tmp_path / "s.yaml", run, grid={"replicas": [1, 2]})
    swept(file, tmp_path / "out")
    trace.write_text(trace.read_text() + "1,9,9\n")
    with pytest.raises(UserError, match="has changed since the sweep began"):
        swept(file, tmp_path / "out", resume=True)


FAILURES = {
    "tests.planning.sweep_samples:Raises": "ZeroDivisionError: not today",
    f"{FAILING}:Exits": "step 0: raised SystemExit: 0 (failing_policies.py, line",
    "tests.planning.sweep_samples:Dies": DIED,
    "tests.planning.sweep_samples:No": (
        "policy: 'tests.planning.sweep_samples:No': module tests.planning.sweep_samples has no No"
    ),
}


def test_a_run_that_fails_is_a_row_and_the_sweep_goes_on(folder: Path, tmp_path: Path) -> None:
    grid = {"deployment.policy": [*FAILURES, "vllm"], "deployment.scheduler.max_num_seqs": [0, 8]}
    file = sweep_file(tmp_path / "s.yaml", base(folder), grid=grid)
    result = swept(file, tmp_path / "out", partial(in_processes, jobs=2))
    assert (result.made, result.failed) == (10, 9)
    for row in rows(tmp_path / "out").to_dict("records"):
        if row["max_num_seqs"] == 0:
            assert "max_num_seqs: 0: " in row["error"]
        elif row["policy"] == "vllm":
            assert row["status"] == "complete"
            assert pd.isna(row["error"])
        else:
            assert row["status"] == "failed" and FAILURES[row["policy"]] in row["error"]
            assert pd.isna(row["ttft_ms_p99"])
    again = swept(file, tmp_path / "out", resume=True)
    assert (again.made, again.kept, again.failed, again.first_error) == (0, 10, 9, result.first_error)
    before = content(tmp_path / "out")
    assert (
        swept(file, tmp_path / "out", executor=partial(in_processes, jobs=2), resume=True, retry_failed=True).made == 9
    )
    assert content(tmp_path / "out") == before


def test_a_sweep_of_which_no_run_can_be_made_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    grid = {"deployment.scheduler.max_num_seqs": [0, 8]}
    file = sweep_file(tmp_path / "s.yaml", base(folder) | {"router": "nowhere"}, grid=grid)
    done = tokentwin("sweep", file, "-o", tmp_path / "out", "-j", "1")
    assert (done.returncode, done.stdout) == (2, "") and "router: 'nowhere': " in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_takes_too_long_is_ended(folder: Path, tmp_path: Path) -> None:
    settings = load_sweep(sweep_file(tmp_path / "s.yaml", base(folder), grid={RATE: [10, 20]}, run_limit_s=0.001))
    executor = find_executor("process", 1, settings.run_limit_s)
    assert Sweep.from_settings(settings).run(tmp_path / "out", executor) == Swept(
        made=2, kept=0, failed=2, first_error=OVERDUE
    )


def test_a_dataset_is_written_by_one_sweep_at_a_time(folder: Path, tmp_path: Path) -> None:
    file = sweep_file(tmp_path / "s.yaml", base(folder), grid={RATE: [10]})
    out = tmp_path / "out"

    def meanwhile(measure: Callable[[Point], RunResult], points: Sequence[Point]) -> Generator[RunResult, None, None]:
        with pytest.raises(UserError, match="being written by another process"):
            swept(file, out, resume=True)
        yield from here(measure, points)

    assert swept(file, out, meanwhile).made == 1


def test_a_fleet_is_priced_pool_by_pool(folder: Path, tmp_path: Path) -> None:
    fleet = {"pools": [{"name": "a", "replicas": 2}, {"name": "b", "deployment": {"scheduler": {"num_blocks": 300}}}]}
    run = base(folder) | {"deployment": {"fleet": fleet}}
    sizes = {"deployment.fleet.pools.0.replicas": [2, 3], "deployment.fleet.router": ["least-tokens"]}
    file = sweep_file(tmp_path / "s.yaml", run, grid=sizes)
    for point in points(load_sweep(file)):
        outcome = Measure()(point)
        assert outcome.values["status"] == "complete", outcome
        assert outcome.values["gpus"] == point.parameters["deployment.fleet.pools.0.replicas"] + 1
        assert outcome.values["kv_blocks"] is None
    wrong = sweep_file(tmp_path / "w.yaml", run, grid={"replicas": [2]})
    with pytest.raises(UserError, match="leave replicas and router out"):
        points(load_sweep(wrong))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tokentwin.cli", "sweep", *map(str, arguments)]


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def started(file: Path, out: Path, runs: int) -> subprocess.Popen[str]:
    """A sweep in a process group of its own, with `runs` runs done and more to do."""
    process = subprocess.Popen(
        command(file, "-o", out, "-j", 2), start_new_session=True, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    while len(list(out.glob(".journal/*.json"))) < runs:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


@pytest.fixture(scope="module")
def long(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A sweep of many runs, and its dataset when nothing disturbs it."""
    here = tmp_path_factory.mktemp("long")
    file = sweep_file(here / "s.yaml", base(folder, requests=200), grid=GRID, seeds=6)
    swept(file, here / "out")
    return file, content(here / "out")


def test_a_killed_sweep_loses_only_the_runs_in_flight(long: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    file, undisturbed = long
    out = tmp_path / "out"
    process = started(file, out, runs=5)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = len(list(out.glob(".journal/*.json")))
    assert 5 <= kept < 24
    while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):  # they end on their own
        time.sleep(0.01)
    again = swept(file, out, resume=True)
    assert (again.made, again.kept) == (24 - kept, kept)
    assert content(out) == undisturbed


def test_ctrl_c_leaves_a_dataset_to_read_and_to_resume(long: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    file, undisturbed = long
    out = tmp_path / "out"
    process = started(file, out, runs=3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "tokentwin: interrupted")  # after how far it was
    there = rows(out)
    assert 3 <= len(there) < 24
    assert set(there["status"]) == {"complete"}
    again = swept(file, out, resume=True)
    assert again.kept == len(there)
    assert content(out) == undisturbed


def test_the_command_says_how_it_went(folder: Path, tmp_path: Path) -> None:
    grid = {"deployment.scheduler.max_num_seqs": [0, 8]}
    file = sweep_file(tmp_path / "s.yaml", base(folder), grid=grid)
    counted = tokentwin("sweep", file, "-o", tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    first, second = counted.stdout.splitlines()
    assert first.startswith("2 runs, about ")
    assert second.startswith(
        "1 of 2 checked runs cannot be made; the first: base.deployment.scheduler.max_num_seqs: 0:"
    )
    made = tokentwin("sweep", file, "-o", tmp_path / "out")
    assert made.returncode == 1
    assert made.stdout == f"2 runs made, 0 kept, 1 failed; the dataset is {tmp_path / 'out' / 'runs'}\n"
    assert "max_num_seqs: 0: " in made.stderr
    wrong = tokentwin("sweep", tmp_path / "none", "-o", tmp_path / "x")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1


def test_an_error_of_many_lines_is_one_line(folder: Path, tmp_path: Path) -> None:
    (point,) = points(load_sweep(sweep_file(tmp_path / "s.yaml", base(folder))))
    assert failed(point, "first\n  second").values == {"status": "failed", "error": "first second"}
