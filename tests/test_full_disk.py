"""Where there is no room left, a command says so in one line and leaves nothing half-written."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 4},{100 + at},9\n" for at in range(60))
ON_A_GPU = ("--gpu", "H100", "--model", "Llama-3.1-8B")
SWEEP = """
base: {gpu: H100, workload: {trace: trace.csv}, deployment: {model: Llama-3.1-8B, device: cuda}}
grid: {deployment.policy: [vllm, sjf]}
"""
pytestmark = pytest.mark.slow
EXPORTS = ("csv", "parquet", "perfetto", "openmetrics")
COMMANDS = {
    "simulate": ("simulate", "trace.csv", *ON_A_GPU, "-o", "out/run"),
    "plan": ("plan", "trace.csv", *ON_A_GPU, "--slo", "ttft_ms p99<=900", "--jobs", "1", "--save", "out/plan.json"),
    "synth": ("trace", "synth", "out/x.parquet", "--requests", "9000", "--arrivals", "poisson:rate=9",
              "--prompt", "lognormal:mean=99,sigma=1", "--output", "uniform:low=1,high=99"),
    "convert": ("trace", "convert", "trace.csv", "out/x.jsonl", "--to", "mooncake"),
    **{format: ("export", "run", "--to", format, "-o", "out/file") for format in EXPORTS},
}  # fmt: skip


def tokentwin(folder: Path, *arguments: str, room: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """The command in a process whose files may hold `room` bytes each: to it that is a disk with no more room."""

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    command = [sys.executable, "-m", "tokentwin.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, preexec_fn=confine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    (folder / "trace.csv").write_text(TRACE)
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "out").mkdir()
    done = tokentwin(folder, "simulate", "trace.csv", *ON_A_GPU, "-o", "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path, name: str) -> None:
    for room in (0, 900):
        done = tokentwin(folder, *COMMANDS[name], room=room)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "cannot be written: File too large" in done.stderr
        assert not list((folder / "out").iterdir())


def test_a_sweep_on_a_full_disk_goes_on_where_it_was(folder: Path) -> None:
    done = tokentwin(folder, "sweep", "sweep.yaml", "-o", "swept", "--jobs", "1", room=1500)
    assert done.returncode == 2 and "cannot be written" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr and not list((folder / "swept").rglob("*.partial"))
    done = tokentwin(folder, "sweep", "sweep.yaml", "-o", "swept", "--jobs", "1", "--resume")
    assert done.returncode == 0, done.stderr
