"""Rungs 1 to 3 of validation, on "real" runs that are simulated with noise, so that the truth is known."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.calibration.test_calibration import KnownCost
from tokentwin.calibration.steps.design import Pace, designed_workloads
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import fit
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.covalidation import covalidate
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.calibration.validation.report import load_report
from tokentwin.commands.validate import validate
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import arrow_schema
from tokentwin.traces.synth import parse_spec, synthesise

DEPLOYMENT = Deployment(
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, num_blocks=120)
)
PACE = Pace(40_000_000, 1_000_000)
TRACE = {
    "name": "unseen",
    "seed": 5,
    "requests": 120,
    "arrivals": {"kind": "poisson", "rate": 3},
    "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.7, "max": 250},
    "output": {"kind": "lognormal", "mean": 20, "sigma": 0.5, "max": 100},
    "system_prompts": {"count": 2, "tokens": {"kind": "fixed", "tokens": 40}},
}


def record(path: Path, workload: Workload, cost: CostModel, **run: Any) -> Path:
    """Write a recording as the engine would, timed by `cost`."""
    columns = {
        "run_id": path.name,
        "clock": "wall",
        "workload": workload.name,
        "deployment": DEPLOYMENT.model_dump_json(),
        "replicas": 1,
        "seed": 0,
        "hardware": "{}",
        "calibration": "",
        "num_blocks": DEPLOYMENT.scheduler.num_blocks - 1,
        "block_size": DEPLOYMENT.scheduler.block_size,
        **run,
    }
    with RecordingWriter(path, columns, workload=workload) as writer:
        done = Cluster(DEPLOYMENT, cost, writer, shares_prefixes=workload.shares_prefixes, tokens=True).run(workload)
        notes = {"canary_before_ns": 1_000_000, "canary_after_ns": 1_010_000}
        writer.close(duration_ns=done.duration_ns, notes=json.dumps(notes))
    return path


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], Calibration]:
    """Return a folder, two "real" runs of one trace, and a calibration made on other traces."""
    folder = tmp_path_factory.mktemp("loop")
    traces = designed_workloads(DEPLOYMENT.scheduler, PACE, 200)
    measured = [record(folder / w.name, w, KnownCost(0.02)) for w in traces]
    calibration = fit(
        MeasuredSteps([Recording.load(path).steps for path in measured]),
        deployment=DEPLOYMENT.model_dump_json(),
        hardware={},
        version="0",
        created="",
        noise={"canary_ns": [1_000_000]},
    )
    calibration.save(folder / "calibration")
    workload = synthesise(parse_spec(TRACE))
    noisy = KnownCost(0.02)
    return folder, [record(folder / f"real-{n}", workload, noisy) for n in (1, 2)], calibration


def test_the_twin_is_close_when_the_model_is_right(loop: tuple[Path, list[Path], Calibration]) -> None:
    folder, real, calibration = loop
    report = covalidate(real, calibration, folder / "report", created="now")
    replay, steps = report.rungs.replay, report.rungs.step
    assert replay is not None and replay.exact
    assert replay.identical == replay.steps > 300
    assert replay.identical_requests == replay.requests == 240
    assert steps is not None and 0 < (steps.regimes["decode"].median_error_pct or 0) < 3
    assert report.worst_error_pct() < 15
    assert not report.disturbed
    assert all(row.floor_pct is not None for row in report.rows)
    assert "all" in report.verdict
    assert load_report(folder / "report") == report
    assert (folder / "report" / "step_residuals.parquet").exists()


def tampered(source: Path, target: Path, column: str, change: Any) -> Path:
    """Return a copy of a recording with one value of `steps` changed."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    table = pq.read_table(source / "steps.parquet")
    values = table[column].to_pylist()
    number = next(n for n, ids in enumerate(table["row_ids"].to_pylist()) if len(ids) > 1 and n > 20)
    values[number] = change(values[number])
    index = table.schema.get_field_index(column)
    field = arrow_schema("steps").field(column)
    table = table.set_column(index, table.schema.field(index), pa.array(values, field.type))
    pq.write_table(table, target / "steps.parquet")
    return target


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("row_ids", lambda ids: [*ids[1:], ids[0]]),
        ("row_tokens", lambda tokens: [tokens[0] + 1, *tokens[1:]]),
        ("preempted_ids", lambda ids: [*ids, 3]),
    ],
)
def test_one_changed_decision_is_found(column, change, loop, tmp_path):
    replay = replay_decisions(Recording.load(tampered(loop[1][0], tmp_path / "run", column, change)))
    assert not replay.exact
    assert replay.identical < replay.steps
    assert column in str(replay.first_difference)


def test_a_drifted_canary_marks_the_run(loop: tuple[Path, list[Path], Calibration], tmp_path: Path) -> None:
    _folder, real, calibration = loop
    from dataclasses import replace

    slow = replace(calibration, noise={"canary_ns": [1_000_000, 1_200_000]})
    report = covalidate(real, slow, tmp_path / "report", created="")
    assert report.disturbed
    assert "1–1.2 ms" in report.disturbance


def test_runs_that_do_not_belong_together_are_refused(loop, tmp_path):
    _folder, real, calibration = loop
    other = record(tmp_path / "other", synthesise(parse_spec({**TRACE, "name": "other"})), KnownCost(0))
    simulated = record(tmp_path / "simulated", synthesise(parse_spec(TRACE)), KnownCost(0), clock="virtual")
    for runs, says in (([real[0], other], "another workload"), ([simulated], "was simulated"), ([], "at least one")):
        with pytest.raises(UserError, match=says):
            covalidate(runs, calibration, tmp_path / "report", created="")
        assert not (tmp_path / "report").exists()


def test_exit_codes(loop: tuple[Path, list[Path], Calibration], tmp_path: Path) -> None:
    folder, real, _ = loop
    options = ["-c", str(folder / "calibration"), "-o", str(tmp_path / "report")]
    runs = list(map(str, real))
    good = CliRunner().invoke(validate, [*runs, *options, "--format", "json"])
    assert good.exit_code == 0, good.output
    assert json.loads(good.output.splitlines()[-1])["rungs"]["replay"]["first_difference"] is None
    assert CliRunner().invoke(validate, [*runs, *options, "--max-error", "0.0001"]).exit_code == 3
    wrong = tampered(real[0], tmp_path / "run", "row_tokens", lambda t: [t[0] + 1, *t[1:]])
    table = CliRunner().invoke(validate, [str(wrong), *options])
    assert table.exit_code == 1
    assert "first difference" in table.output
