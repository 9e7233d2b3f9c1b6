"""Runs measured on one's own servers: they join the evidence, and say which run to measure next."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests.traces.test_measured_readers import aiperf_phases, aiperf_row, bench, guidellm_benchmark
from tokentwin.calibration.steps.evidence import bundled_evidence
from tokentwin.calibration.steps.external_calibration import identity, predicted_cost
from tokentwin.calibration.steps.measured_runs import FILE, MeasuredRuns
from tokentwin.calibration.validation.external.next_run import next_run
from tokentwin.calibration.validation.external.own_runs import learnt_from_runs
from tokentwin.calibration.validation.external.predicted_run import PredictedRun, predicted_run, taught
from tokentwin.cli import cli
from tokentwin.planning.costs import priced
from tokentwin.planning.resolution import calibration_in
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.traces.measured.csv_rows import CsvRows

SERVER = Deployment.model_validate(
    {
        "model": "Llama-3.1-8B",
        "device": "cuda",
        "engine": "vllm 0.19.0",
        "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 8192, "num_blocks": 20000},
    }
)
STEP = StepPlan.from_amounts(decode_rows=32, decode_context=32 * 1000, decode_squares=32 * 10**6, sampled_rows=32)


def csv(folder: Path, *rows: str, header: str = "prompt_tokens,output_tokens,concurrency,ttft_ms,tpot_ms") -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def as_measured(folder: Path, loops: list[tuple[int, int, int]], offset: float) -> Path:
    """Write the figures of a server whose numbers all differ from the belief by a factor of exp(`offset`)."""
    path = csv(folder, *(f"{prompt},{output},{slots},1,1" for prompt, output, slots in loops))
    rows = []
    for run in runs_in(path):
        logs = bundled_evidence().belief(run.origin).logs + offset
        tpot, ttft = run.predicted(logs)[0]
        prompt, output = run.measured_run.lengths or (0, 0)
        rows.append(f"{prompt},{output},{run.measured_run.workload.concurrency},{ttft},{tpot}")
    return csv(folder, *rows)


def runs_in(path: Path) -> list[PredictedRun]:
    from tokentwin.calibration.validation.external.own_runs import _case

    case, folder = _case(path, SERVER, "H100")
    return [predicted_run(case, run) for run in case.format.read(folder)]


SLOW_TO_LEARN = pytest.mark.xfail(strict=True, reason="the fitted spread of sources keeps 0.65 of an offset of -0.3")


@pytest.mark.parametrize("offset", [pytest.param(-0.3, marks=SLOW_TO_LEARN), 0.25])
def test_a_server_unlike_the_others_is_learnt_from_a_few_runs(tmp_path: Path, offset: float) -> None:
    """Three runs of a server that is faster or slower than published ones predict it better at other loads."""
    measured = as_measured(tmp_path, [(1000, 100, 1), (1000, 100, 16), (3000, 60, 48)], offset)
    learnt = learnt_from_runs([measured], SERVER, "H100", "")
    before, after = (predicted_cost("H100", SERVER, known).step_ns(STEP) for known in (None, learnt))
    truth = before * np.exp(offset)
    assert abs(np.log(after / truth)) < abs(offset) / 2
    assert all(
        abs(np.log(f.others / f.measured)) < abs(np.log(f.blind / f.measured)) for f in learnt.figures if f.others
    )
    assert len(learnt.figures) == 6 and all(f.low < (f.others or 0) < f.high for f in learnt.figures)


def test_more_runs_never_make_the_belief_wider(tmp_path: Path) -> None:
    path = as_measured(tmp_path, [(1000, 100, 1), (1000, 100, 16), (3000, 60, 48)], 0.1)
    runs = runs_in(path)
    before = bundled_evidence()
    widths = []
    for count in range(len(runs) + 1):
        known = before.joined([taught(runs[0].origin, runs[:count], before.belief(runs[0].origin).logs)])
        widths.append(np.diag(known.belief(runs[0].origin).covariance))
    assert all((later <= earlier + 1e-12).all() for earlier, later in pairwise(widths))
    assert widths[-1].sum() < widths[0].sum()


def test_own_runs_help_their_own_server_most(tmp_path: Path) -> None:
    """The evidence of one server reaches other models of its engine and GPU, but changes them less."""
    measured = as_measured(tmp_path, [(1000, 100, 1), (1000, 100, 16), (3000, 60, 48)], 0.25)
    learnt = learnt_from_runs([measured], SERVER, "H100", "")

    def change(gpu: str, **other: Any) -> float:
        deployment = SERVER.model_copy(update=other)
        before, after = (predicted_cost(gpu, deployment, known).step_ns(STEP) for known in (None, learnt))
        return abs(float(np.log(after / before)))

    assert change("H100") > change("H100", model="Qwen3-8B") > 0
    assert change("H100") > change("B200")


def test_the_next_run_says_what_it_would_bring(tmp_path: Path) -> None:
    """The promised interval is the one after a run that was measured as predicted; each further run brings less."""
    first = next_run(bundled_evidence(), "H100", SERVER, 1000, 100, 16)
    assert first.tpot[1][1] < first.tpot[0][1] and first.ttft[1][1] < first.ttft[0][1]
    learnt = learnt_from_runs([as_measured(tmp_path, [(1000, 100, first.concurrency)], 0.0)], SERVER, "H100", "")
    second = next_run(learnt.evidence, "H100", SERVER, 1000, 100, 16)
    assert second.tpot[0] == pytest.approx(first.tpot[1], rel=0.02)
    assert second.ttft[0] == pytest.approx(first.ttft[1], rel=0.02)
    assert second.tpot[0][1] / second.tpot[1][1] < first.tpot[0][1] / first.tpot[1][1]


def test_the_next_run_may_be_of_a_pipeline() -> None:
    """The scheduler of a pipeline waits some plans between two decodes; its steps are counted all the same."""
    staged = SERVER.model_copy(update={"pipeline_parallel_size": 2}).rescheduled(async_scheduling=True)
    run = next_run(bundled_evidence(), "H100", staged, 1000, 100, 16)
    assert run.tpot[1][1] < run.tpot[0][1] and run.ttft[1][1] < run.ttft[0][1]


def test_a_calibration_from_runs_is_kept_in_a_file(tmp_path: Path) -> None:
    learnt = learnt_from_runs([as_measured(tmp_path, [(1000, 100, 4)], 0.2)], SERVER, "H100", "today")
    learnt.save(tmp_path / "kept")
    again = calibration_in(tmp_path / "kept")
    assert isinstance(again, MeasuredRuns) and again == MeasuredRuns.load(tmp_path / "kept" / FILE)
    assert again.id == learnt.id and identity("H100", again) != identity("H100")
    known = priced(str(tmp_path / "kept"), None, SERVER)
    assert known.gpu is not None and known.gpu.name == "H100"
    assert known.cost.step_ns(STEP) == predicted_cost("H100", SERVER, learnt).step_ns(STEP)
    damaged = json.loads((tmp_path / "kept" / FILE).read_text())
    damaged["taught"][0]["vector"] = "none"
    (tmp_path / "kept" / FILE).write_text(json.dumps(damaged))
    with pytest.raises(UserError, match="damaged"):
        calibration_in(tmp_path / "kept")


def written(folder: Path, kind: str) -> Path:
    """Write a measured file of a kind, and return its path."""
    if kind == "aiperf":
        (folder / "run").mkdir()
        rows = [aiperf_row(100 * at, 50.0, 400.0) for at in range(4)]
        (folder / "run" / "profile_export.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "run" / "profile_export_aiperf.json").write_text(
            json.dumps({"input_config": {"phases": aiperf_phases()}})
        )
        return folder / "run"
    if kind == "case":
        csv(folder, "100,20,2,30,8")
        case = {
            "name": "mine", "title": "mine", "source": "me", "engine": "vllm 0.19.0", "gpu": "H100", "shown": [],
            "deployment": SERVER.model_dump(mode="json", exclude_unset=True, exclude={"engine"}),
            "measured": {"format": "csv", "file": "rows.csv"},
        }  # fmt: skip
        (folder / "mine.yaml").write_text(json.dumps(case))
        return folder / "mine.yaml"
    if kind == "recording":
        server = folder / "server.yaml"
        server.write_text(json.dumps(SERVER.model_dump(mode="json", exclude_unset=True)))
        run(
            "simulate",
            str(traffic(folder)),
            "--limit",
            "8",
            "--gpu",
            "H100",
            "-d",
            str(server),
            "-o",
            str(folder / "run"),
        )
        runs = folder / "run" / "runs.parquet"
        table = pq.read_table(runs)
        pq.write_table(table.set_column(table.column_names.index("clock"), "clock", [["wall"]]), runs)  # as if measured
        return folder / "run"
    documents = {"bench-serve": bench(), "guidellm": {"benchmarks": [guidellm_benchmark()]}}
    (folder / "result.json").write_text(json.dumps(documents[kind]))
    return folder / "result.json"


@pytest.mark.parametrize("kind", ["aiperf", "bench-serve", "guidellm", "case", "recording"])
def test_a_file_says_its_format(tmp_path: Path, kind: str) -> None:
    learnt = learnt_from_runs([written(tmp_path, kind)], None if kind in ("case", "recording") else SERVER, "H100", "")
    assert learnt.figures and all(figure.blind > 0 for figure in learnt.figures)
    assert sum(part["rows"] for part in learnt.taught) == len(learnt.figures)


def test_rows_state_their_own_settings(tmp_path: Path) -> None:
    """An open loop and a closed one, on two GPUs, with settings of the deployment and of its scheduler."""
    header = "prompt_tokens,output_tokens,concurrency,request_rate,requests,ttft_ms,tpot_ms,gpu,max_num_seqs,engine"
    path = csv(tmp_path, "500,30,,4,20,40,9,H100,,", "500,30,4,,,60,,H200,32,vllm 0.20.1", header=header)
    first, second = CsvRows(file=path.name).read(tmp_path)
    assert first.offered_per_s == 4 and first.workload.concurrency is None and len(list(first.workload.requests)) == 20
    assert second.workload.concurrency == 4 and len(list(second.workload.requests)) == 40
    assert second.settings == {"scheduler": {"max_num_seqs": 32}} and second.figures == {"ttft_ms.mean": 60.0}
    learnt = learnt_from_runs([path], SERVER, None, "")
    origins = [part["origin"] for part in learnt.taught]
    assert {(origin["gpu"], origin["version"]) for origin in origins} == {
        ("H100", "vllm 0.19.0"),
        ("H200", "vllm 0.20.1"),
    }


@pytest.mark.parametrize(
    ("row", "header", "field"),
    [
        ("100,20,2,3,40,8", "prompt_tokens,output_tokens,concurrency,request_rate,ttft_ms,tpot_ms", "concurrency"),
        ("100,20,40,8", "prompt_tokens,output_tokens,ttft_ms,tpot_ms", "concurrency"),
        ("100,20,2", "prompt_tokens,output_tokens,concurrency", "ttft_ms"),
        ("100,20,2,40,x", "prompt_tokens,output_tokens,concurrency,ttft_ms,colour", "colour"),
        ('100,20,2,40,"[1"', "prompt_tokens,output_tokens,concurrency,ttft_ms,max_num_seqs", "max_num_seqs"),
        ("100,20,2,40,many", "prompt_tokens,output_tokens,concurrency,ttft_ms,max_num_seqs", "max_num_seqs"),
        ("0,20,2,40", "prompt_tokens,output_tokens,concurrency,ttft_ms", "prompt_tokens"),
    ],
)
def test_a_wrong_row_is_one_line(tmp_path: Path, row: str, header: str, field: str) -> None:
    with pytest.raises(UserError) as error:
        learnt_from_runs([csv(tmp_path, row, header=header)], SERVER, "H100", "")
    assert field in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "deployment", "gpu", "field"),
    [
        ("rows.csv", None, "H100", "deployment"),
        ("rows.csv", SERVER, None, "gpu"),
        ("absent.csv", SERVER, "H100", "measured"),
        ("rows.txt", SERVER, "H100", "measured"),
        ("empty.json", SERVER, "H100", "measured"),
        ("number.json", SERVER, "H100", "measured"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, name: str, deployment: Deployment | None, gpu: str | None, field: str
):
    csv(tmp_path, "100,20,2,30,8")
    (tmp_path / "rows.txt").write_text("")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "number.json").write_text("3")
    with pytest.raises(UserError) as error:
        learnt_from_runs([tmp_path / name], deployment, gpu, "")
    assert error.value.field.startswith(field)


def test_a_plan_chooses_with_measured_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster server needs fewer replicas; the calibration is kept, and is that of `calibrate --from-measured`."""
    monkeypatch.setenv("TOKENTWIN_HOME", str(tmp_path / "home"))
    (tmp_path / "d.yaml").write_text(json.dumps(SERVER.model_dump(mode="json", exclude_unset=True)))
    measured = as_measured(tmp_path, [(1000, 100, 1), (1000, 100, 16), (3000, 60, 48)], -0.4)
    of_server = ["-d", str(tmp_path / "d.yaml"), "--gpu", "H100"]
    planned = ["plan", str(traffic(tmp_path)), "--slo", "tpot_ms p99<=11", *of_server, "-j", "1"]
    blind, chosen = run(*planned), run(*planned, "--measured", str(measured))
    assert replicas(chosen.stdout) < replicas(blind.stdout)
    assert "--max-concurrency" in blind.stdout
    run("calibrate", "--from-measured", str(measured), *of_server, "-o", str(tmp_path / "kept"))
    (kept,) = (tmp_path / "home" / "measured").iterdir()
    assert str(kept) in chosen.stderr and calibration_in(kept).id == calibration_in(tmp_path / "kept").id
    with pytest.raises(UserError, match="--calibration"):
        run(*planned, "--measured", str(measured), "-c", str(tmp_path / "kept"))


def replicas(answer: str) -> int:
    return int(answer.split(" replica")[0])


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), catch_exceptions=False, standalone_mode=False)


def traffic(folder: Path) -> Path:
    path = folder / "traffic.yaml"
    path.write_text(
        "{requests: 60, seed: 1, arrivals: {kind: poisson, rate: 30}, "
        "prompt: {kind: fixed, tokens: 1000}, output: {kind: fixed, tokens: 100}}\n"
    )
    return path
