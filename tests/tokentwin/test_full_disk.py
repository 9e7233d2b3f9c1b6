"""Where there is no room left, a command says so in one line and leaves nothing half-written."""

import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.command import tokentwin

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 4},{100 + at},9\n" for at in range(60))
ON_A_GPU = ("--gpu", "H100", "--model", "Llama-3.1-8B")
SWEEP = """
base: {gpu: H100, workload: {trace: trace.csv}, deployment: {model: Llama-3.1-8B, device: cuda}}
grid: {deployment.policy: [vllm, sjf]}
"""
EXPORTS = ("csv", "parquet", "perfetto", "openmetrics")
COMMANDS = {
    "simulate": ("simulate", "trace.csv", *ON_A_GPU, "-o", "out/run"),
    "plan": ("plan", "trace.csv", *ON_A_GPU, "--slo", "ttft_ms p99<=900", "--jobs", "1", "--save", "out/plan.json"),
    "synth": ("trace", "synth", "out/x.parquet", "--requests", "9000", "--arrivals", "poisson:rate=9",
              "--prompt", "lognormal:mean=99,sigma=1", "--output", "uniform:low=1,high=99"),
    "convert": ("trace", "convert", "trace.csv", "out/x.jsonl", "--to", "mooncake"),
    **{format: ("export", "run", "--to", format, "-o", "out/file") for format in EXPORTS},
}  # fmt: skip


@contextmanager
def disk_of(room_bytes: int) -> Iterator[None]:
    """Limit files to `room_bytes` each, which is a full disk to a command.

    Python writes no bytecode meanwhile: it would be cut off, too, and later be taken for a module.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with patch.object(sys, "dont_write_bytecode", True), patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    (folder / "trace.csv").write_text(TRACE)
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "out").mkdir()
    done = tokentwin("simulate", "trace.csv", *ON_A_GPU, "-o", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_leaves_nothing(folder: Path, name: str) -> None:
    for room in (900,) if name == "plan" else (0, 900):  # to plan takes seconds
        with disk_of(room):
            done = tokentwin(*COMMANDS[name], cwd=folder)
        assert done.returncode == 2, done.stdout + done.stderr
        said = [line for line in done.stderr.splitlines() if not re.search("% done|: searching|: From quick", line)]
        assert len(said) == 1, done.stderr
        assert "cannot be written: File too large" in done.stderr
        assert not list((folder / "out").iterdir())


def test_a_sweep_on_a_full_disk_goes_on_where_it_was(folder: Path) -> None:
    sweep = ("sweep", "sweep.yaml", "-o", "swept", "--jobs", "1")
    with disk_of(1500):
        done = tokentwin(*sweep, cwd=folder)
    assert done.returncode == 2 and "cannot be written" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr and not list((folder / "swept").rglob("*.partial"))
    done = tokentwin(*sweep, "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
