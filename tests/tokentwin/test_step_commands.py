"""The commands that need no engine of ours: explain a step, simulate a GPU, learn another engine from its log."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.calibration.test_step_model import HEADER
from tests.command import tokentwin
from tokentwin.calibration.steps.external_calibration import FILE, ExternalCalibration
from tokentwin.cli import cli
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

FLAGS = ["--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--max-model-len", "2048"]
BLOCKS = ["--num-blocks", "500"]  # of which no memory is asked


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    arguments = ["--requests", 60, "--arrivals", "poisson:rate=4", "--prompt", "300", "--output", "40"]
    run("trace", "synth", path, *arguments)
    return path


def test_explain_shows_what_an_ascii_terminal_can() -> None:
    done = tokentwin("explain", encoding="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "?s" in done.stdout and done.stdout.isascii()


def test_explain_shows_operations_that_sum_to_the_step() -> None:
    told = json.loads(run("explain", "--gpu", "H100", "--rows", 8, "--prompts", 1, "--format", "json").output)
    assert sum(told["parts_ns"].values()) == pytest.approx(told["step_ns"])
    assert sum(told["kernels_ns"].values()) == pytest.approx(sum(o["ns"] for o in told["operations"]))
    assert {"qkv", "decode attention", "prefill attention", "head"} <= {o["name"] for o in told["operations"]}
    assert all(0 < o["utilisation"] <= 1 for o in told["operations"])
    table = run("explain", "--model", "Qwen3-30B-A3B", "--gpu", "H200", "--tensor-parallel-size", 2).output
    assert "experts" in table and "all-reduce" in table and "bound by" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--rows", "0"], "empty step"),
        (["explain", "--gpu", "H900"], "H900"),
        (["explain", "--model", "nonesuch"], "nonesuch"),
        (["explain", "--tensor-parallel-size", "3"], "must split Llama-3.1-8B's 32 heads"),
        (
            ["simulate", "{trace}", "--gpu", "H100", *FLAGS, *BLOCKS, "--tensor-parallel-size", "3", "-o", "{out}"],
            "split",
        ),
        (["simulate", "{trace}", "-o", "{out}"], "give --calibration, or --gpu"),
        (["calibrate", "-o", "{out}", "--from-iterations", "{log}"], "gpu"),
        (["calibrate", "-o", "{out}", "--gpu", "H100"], "from-iterations"),
        (["calibrate", "-o", "{out}", "--from-iterations", "{trace}", "--gpu", "H100"], "iteration log"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, trace: Path, tmp_path: Path) -> None:
    filled = [a.format(trace=trace, out=tmp_path / "out", log=tmp_path / "log.csv") for a in arguments]
    with pytest.raises(UserError, match=says) as caught:
        run(*filled)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_gpu_is_simulated_from_its_kernels_with_bands_and_trust(trace: Path, tmp_path: Path) -> None:
    told = json.loads(
        run("simulate", trace, "--gpu", "H100", *FLAGS, "-o", tmp_path / "run", "--format", "json").output
    )
    assert told["requests"] == {"finished": 60}
    assert told["trust"]["level"] == "interpolated" and told["trust"]["reason"]
    low, high = told["bands"]["tpot_ms"]["p50"]
    assert low < told["distributions"]["tpot_ms"]["p50"] < high
    slower = json.loads(
        run("simulate", trace, "--gpu", "L40S", *FLAGS, "-o", tmp_path / "slow", "--format", "json").output
    )
    assert slower["distributions"]["tpot_ms"]["p50"] > 2 * told["distributions"]["tpot_ms"]["p50"]


def test_a_specification_is_simulated_as_the_trace_that_it_makes(trace: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("{requests: 60, arrivals: {kind: poisson, rate: 4}, prompt: 300, output: 40}")
    for offered, out in ((trace, "a"), (spec, "b")):
        run("simulate", offered, "--gpu", "H100", *FLAGS, "--no-band", "--limit", 20, "-o", tmp_path / out)
    assert Recording.load(tmp_path / "a").requests.equals(Recording.load(tmp_path / "b").requests)


def test_an_engine_is_learnt_from_its_iterations_and_simulated(trace: Path, tmp_path: Path) -> None:
    rows = [f"0,0,0,{n},{n * 300},0,{6 + 0.05 * n}\n" for n in range(1, 33)] * 3
    rows += [f"{n},1,0,8,2400,0,{8 + 0.02 * n}\n" for n in range(16, 512, 16)]
    log = tmp_path / "log.csv"
    log.write_text(HEADER + "".join(rows))
    learnt = tmp_path / "learnt"
    output = run(
        "calibrate", "-o", learnt, "--from-iterations", log, "--gpu", "H100", "--model", "Llama-3.1-8B", *FLAGS
    ).output
    assert "middle third" in output
    assert ExternalCalibration.load(learnt / FILE).gpu == "H100"
    with pytest.raises(UserError, match="already holds a calibration"):
        run("calibrate", "-o", learnt, "--from-iterations", log, "--gpu", "H100", *FLAGS)
    told = json.loads(run("simulate", trace, "-c", learnt, "-o", tmp_path / "run", "--format", "json").output)
    assert told["distributions"]["tpot_ms"]["p50"] == pytest.approx(6.4, abs=0.6)


# What a newcomer tried


def simulated(trace: Path, out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli, ["simulate", str(trace), "--gpu", "H100", "--no-band", "-o", str(out), *arguments], catch_exceptions=True
    )


def recorded(out: Path) -> dict[str, Any]:
    deployment: dict[str, Any] = json.loads(Recording.load(out).run["deployment"])
    return deployment


@pytest.mark.parametrize("arguments", [("--model", "Llama-3.1-70B"), ("--gpu-memory-utilization", "0.01")])
def test_a_model_that_does_not_fit_is_refused(trace: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = simulated(trace, tmp_path / "out", *arguments)
    assert isinstance(result.exception, UserError) and "has room for 0 KV blocks" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_blocks_that_are_stated_do_not_follow_from_memory(trace: Path, tmp_path: Path) -> None:
    assert simulated(trace, tmp_path / "out", "--num-blocks", "77").exit_code == 0
    assert recorded(tmp_path / "out")["scheduler"]["num_blocks"] == 77
    both = simulated(trace, tmp_path / "both", "--num-blocks", "77", "--gpu-memory-utilization", "0.5")
    assert isinstance(both.exception, UserError) and "cannot be combined" in str(both.exception)


def test_a_file_that_names_no_model_gets_the_usual_one(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "fair.yaml").write_text("policy: fair\n")
    assert simulated(trace, tmp_path / "out", "-d", str(tmp_path / "fair.yaml")).exit_code == 0
    found = recorded(tmp_path / "out")
    assert (found["model"], found["policy"], found["device"]) == ("Llama-3.1-8B", "fair", "cuda")
    assert found["scheduler"]["num_blocks"] > 20_000  # by the memory of an H100


def test_saturation_does_not_depend_on_what_is_kept(trace: Path, tmp_path: Path) -> None:
    """A queue that only grows shorter is a backlog, whether or not the steps were recorded."""
    crowd = ("--max-num-seqs", "1", "--rate-scale", "1000")
    assert simulated(trace, tmp_path / "whole", *crowd).exit_code == 0
    assert simulated(trace, tmp_path / "summary", *crowd, "--summary-only").exit_code == 0
    found = [
        RunMetrics.from_recording(Recording.load(tmp_path / name)).scalars()["saturation"]
        for name in ("whole", "summary")
    ]
    assert found[0] == found[1] != "STABLE"


def test_a_demo_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli, ["demo", "-o", str(tmp_path / "file"), "--model", "random:llama"])
    assert isinstance(result.exception, UserError) and "cannot be made" in str(result.exception)
