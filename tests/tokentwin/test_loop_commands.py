"""The whole loop through the command line, with a tiny model: bench, calibrate, simulate, validate."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
import yaml

pytest.importorskip("torch", reason="the engine extra is not installed")

import itertools

from tests.command import tokentwin
from tokentwin import api
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

pytestmark = pytest.mark.engine

DEPLOYMENT = {
    "model": "random:qwen3",
    "dtype": "float32",
    "scheduler": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "num_blocks": 40,
        "scheduler_reserve_full_isl": False,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a deployment, a trace, a calibration and a recording of the trace."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "deployment.yaml").write_text(yaml.safe_dump(DEPLOYMENT))
    made = tokentwin(
        "trace", "synth", folder / "trace.parquet", "--requests", 60, "--seed", 4, "--arrivals", "poisson:rate=25",
        "--prompt", "lognormal:mean=40,sigma=0.6,max=120", "--output", "lognormal:mean=20,sigma=0.5,max=60",
        "--sessions", "turns=2,think_ms=300",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    calibrated = tokentwin(
        "calibrate", "-o", folder / "calibration", "--minutes", 0.05, "-d", folder / "deployment.yaml"
    )
    assert calibrated.returncode == 0, calibrated.stderr
    assert "held-out" in calibrated.stdout
    benched = tokentwin("bench", folder / "trace.parquet", "-o", folder / "real", "-d", folder / "deployment.yaml")
    assert benched.returncode == 0, benched.stderr
    assert "complete: 60/60" in benched.stdout
    return folder


def test_every_time_is_stamped_and_in_order(folder: Path) -> None:
    for row in Recording.load(folder / "real").requests.to_pylist():
        times = [row[name] for name in ("arrival_ns", "send_ns", "queued_ns", "scheduled_ns", "first_token_ns")]
        assert times == sorted(times)
        assert len(row["token_times_ns"]) == row["output_tokens"]
        assert row["token_times_ns"] == sorted(row["token_times_ns"])
        assert (row["token_times_ns"][0], row["token_times_ns"][-1]) == (row["first_token_ns"], row["finish_ns"])


def test_steps_add_up(folder: Path) -> None:
    recording = Recording.load(folder / "real")
    steps = recording.steps.to_pylist()
    for before, after in itertools.pairwise(steps):
        assert before["end_ns"] <= after["plan_ns"] <= after["start_ns"] <= after["end_ns"]
    for step in steps:
        assert step["schedule_ns"] + step["prepare_ns"] <= step["start_ns"] - step["plan_ns"]
        assert step["forward_ns"] + step["sample_ns"] == step["end_ns"] - step["start_ns"]
        assert sum(step["row_tokens"]) == step["prefill_tokens"] + step["decode_rows"]
    sampled = sum(step["sampled_rows"] for step in steps)
    assert sampled == pc.sum(recording.requests["output_tokens"]).as_py()


def test_validate_and_simulate(folder: Path) -> None:
    again = tokentwin("bench", folder / "trace.parquet", "-o", folder / "again", "-d", folder / "deployment.yaml")
    assert again.returncode == 0, again.stderr
    report = tokentwin(
        "validate", folder / "real", folder / "again", "-c", folder / "calibration", "-o", folder / "report",
        "--format", "json",
    )  # fmt: skip
    assert report.returncode == 0, report.stdout + report.stderr
    ladder = json.loads(report.stdout)["rungs"]
    assert ladder["replay"]["first_difference"] is None
    assert {row["metric"] for row in ladder["run"]["rows"]} >= {"ttft_ms", "tpot_ms", "e2e_ms", "output_throughput"}
    assert all(row["floor_pct"] is not None for row in ladder["run"]["rows"])
    simulated = tokentwin(
        "simulate", folder / "trace.parquet", "-c", folder / "calibration", "-o", folder / "fleet",
        "--replicas", 3, "--router", "least-tokens", "--rate-scale", 3, "--format", "json",
    )  # fmt: skip
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["requests"] == {"finished": 60}
    assert set(Recording.load(folder / "fleet").requests["replica"].to_pylist()) == {0, 1, 2}


def test_python_measures_as_the_commands_do(folder: Path, tmp_path: Path) -> None:
    """Traffic recorded now, on the calibrated engine; and a calibration of recordings."""
    report = api.validate(
        traffic=folder / "trace.parquet", calibration=folder / "calibration", out=tmp_path, repeats=1, limit=12
    )
    assert report.recordings is not None and report.recordings.real == ("real-1",)
    assert report.rungs.replay is not None and report.rungs.replay.exact and report.rungs.replay.requests == 12
    fitted = Calibration.load(folder / "calibration")
    again = api.calibrate(out=tmp_path / "again", recordings=sorted((folder / "calibration" / "runs").iterdir()))
    assert isinstance(again, Calibration) and again.fitted_steps == fitted.fitted_steps


def test_virtual_arrivals_saturate(folder: Path) -> None:
    done = tokentwin(
        "bench", folder / "trace.parquet", "-o", folder / "saturated", "-d", folder / "deployment.yaml",
        "--virtual-arrivals", "--limit", 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recording = Recording.load(folder / "saturated")
    requests = recording.requests
    assert set(requests["arrival_ns"].to_pylist()) == {0}
    assert pc.sum(requests["preemptions"]).as_py() > 0, "the trace should press on KV memory"
    assert pc.sum(requests["prefix_hit_tokens"]).as_py() > 0, "later turns should hit"
    assert replay_decisions(recording).exact
    assert RunMetrics.from_recording(recording).scalars()["concurrency_peak"] == 30


# The command line, which says on its standard output how many requests have ended: nothing to wait for by the clock.
TELLING = """
import contextlib, sys
import tokentwin.planning.progress
from tokentwin.cli import main

@contextlib.contextmanager
def counting(what, total):
    yield lambda done: print(done, flush=True)

tokentwin.planning.progress.counting = counting
main()
"""


def test_ctrl_c_writes_what_there_is(folder: Path) -> None:
    slow = tokentwin(
        "trace", "synth", folder / "slow.parquet", "--requests", 400, "--arrivals", "constant:rate=8",
        "--prompt", "fixed:tokens=20", "--output", "fixed:tokens=8",
    )  # fmt: skip
    assert slow.returncode == 0, slow.stderr
    command = ["bench", folder / "slow.parquet", "-o", folder / "cut", "-d", folder / "deployment.yaml"]
    running = subprocess.Popen([sys.executable, "-c", TELLING, *map(str, command)], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "3\n" in iter(running.stdout.readline, ""), "it ended before three requests did"
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate()
    assert running.returncode == 130, output
    recording = Recording.load(folder / "cut")
    assert recording.run["status"] == "interrupted"
    finished = RunMetrics.from_recording(recording).statuses()["finished"]
    assert 0 < finished < 400
    assert replay_decisions(recording).exact


def test_pooling_requests_are_validated_without_figures_of_tokens(folder: Path) -> None:
    (folder / "pooling.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + "0.1,40,0\n0.2,90,0\n" * 4)
    benched = tokentwin("bench", folder / "pooling.csv", "-o", folder / "pooled", "-d", folder / "deployment.yaml")
    assert "complete: 8/8" in benched.stdout, benched.stderr
    done = tokentwin("validate", folder / "pooled", "-c", folder / "calibration", "-o", folder / "pooling-report")
    assert done.returncode == 0, done.stderr
    assert "8/8 identical" in done.stdout and "e2e_ms" in done.stdout
    assert "ttft" not in done.stdout and "nan" not in done.stdout.lower()


def test_the_demo_goes_all_the_way(tmp_path: Path) -> None:
    """The README's first command, with a tiny model and a short trace."""
    done = tokentwin("demo", "-o", tmp_path / "demo", "--model", "random:llama", "--minutes", 0.1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps decided alike" in done.stdout
    assert "with the machine's speed known" in done.stdout
    assert f"tokentwin dashboard {tmp_path / 'demo'}" in done.stdout
    report = json.loads((tmp_path / "demo" / "validation" / "report.json").read_text())
    assert report["rungs"]["replay"]["first_difference"] is None
    for recording in [*report["recordings"]["real"], report["recordings"]["simulated"]]:
        assert Recording.load(tmp_path / "demo" / "validation" / recording).run["status"] == "complete"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "{}/nothing.csv", "-o", "{}/x"], "nothing.csv"),
        (["bench", "{}/trace.parquet", "-o", "{}/real", "-d", "{}/deployment.yaml"], "real"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "-d", "{}/deployment.yaml", "--policy", "nobody"], "policy"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "--device", "tpu"], "device"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "--model", "random:gpt"], "model"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "--attention", "magic", "-d", "{}/deployment.yaml"], "attention"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "--model", "random:llama", "--block-size", "0"], "block_size"),
        (["simulate", "{}/trace.parquet", "-c", "{}/real", "-o", "{}/x"], "calibration"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--router", "none"], "router"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--router", "builtins:int"], "choose"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--policy", "os:getcwd"], "schedule"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--replicas", "0"], "replicas"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--rate-scale", "1e-15"], "rate"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--rate-scale", "nan"], "finite"),
        (["simulate", "{}/trace.parquet", "-c", "{}/calibration", "-o", "{}/x", "--model", "smollm2"], "calibrate"),
        (["bench", "{}/trace.parquet", "-o", "{}/x", "-d", "{}/deployment.yaml", "--num-blocks", "9999999"], "GiB"),
        (["validate", "{}/real", "{}/real", "-c", "{}/calibration", "-o", "{}/x"], "twice"),
        (["validate", "{}/real", "-c", "{}/calibration", "-o", "{}/real"], "is a recording"),
        (["trace", "convert", "{}/trace.parquet", "/dev/null", "--to", "mooncake", "--force"], "/dev/null"),
        (["simulate", "{}/deployment.yaml", "-c", "{}/calibration", "-o", "{}/x"], "deployment.yaml"),
        (["validate", "{}/nothing", "-c", "{}/calibration", "-o", "{}/x"], "nothing"),
        (["validate", "-c", "{}/calibration", "-o", "{}/x"], "give either recordings, or --trace"),
        (["validate", "{}/real", "-c", "{}/calibration", "-o", "{}/x", "--limit", "3"], "needs --trace"),
        (["calibrate", "-o", "{}/x", "--from-recordings", "{}/real", "--model", "smollm2"], "--from-recordings"),
        (["calibrate", "-o", "{}/calibration"], "out"),
        (["generate", "hello", "--model", "random:llama"], "model"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folder: Path, arguments: list[str], says: str) -> None:
    done = tokentwin(*[argument.format(folder) for argument in arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    errors = [line for line in done.stderr.splitlines() if line != "loading random:qwen3"]
    assert len(errors) == 1, done.stderr
    assert not (folder / "x").exists()
