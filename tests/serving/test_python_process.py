"""Nothing is imported from the working directory, by any process that is started there."""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.planning.sweep_samples import content
from tokentwin.planning.jobs.job import Job
from tokentwin.serving.python_process import HOME, module_command, module_environment

_OURS = ("serving", "sim", "calibration", "traces", "realengine", "tokentwin")
_SWEPT = """
base: {gpu: H100, workload: {trace: trace.csv}, deployment: {model: Llama-3.1-8B, device: cuda}}
grid: {deployment.policy: [vllm, sjf], deployment.scheduler.max_num_seqs: [1, 2, 8, 16]}
per_request: true
full_metrics: true
"""
_SWEEP = ("sweep", "sweep.yaml", "--jobs", "2")
_CONSOLE = "from tokentwin.cli import main\n\nif __name__ == '__main__':\n    main()\n"


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user's own modules that have the names of ours, and of two of Python's."""
    for name in (*_OURS, "pickle", "random"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory was run')\n")
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,100,10\n2,100,10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(HOME))
    return tmp_path


def test_jobs_do_not_import_from_where_the_server_was_started(strangers: Path) -> None:
    job = Job(strangers / "jobs", "tests.planning.tiny_job:tiny", {"number": 4})
    job.start()
    end = time.monotonic() + 240
    while job.status.active or job.status.state == "absent":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert job.result == {"answer": 8}, (job.directory / "log.txt").read_text()


def test_workers_of_plans_and_sweeps_do_not_import_from_where_they_were_started(strangers: Path) -> None:
    plan = ("plan", "trace.csv", "--gpu", "H100", "--tp", "1", "--slo", "ttft_ms p99<=900")
    (strangers / "sweep.yaml").write_text(_SWEPT)
    for arguments in ((*plan, "--jobs", "2"), (*_SWEEP, "-o", "swept")):
        _run_console(strangers, *arguments)
    assert len(content(strangers / "swept")) > 8


@pytest.mark.deep
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_a_sweep_has_the_same_bytes_on_ray_whose_workers_import_nothing_else_either(strangers: Path) -> None:
    (strangers / "sweep.yaml").write_text(_SWEPT)
    for where in ("swept", "by-ray"):
        _run_console(strangers, *_SWEEP, "-o", where, *(("--executor", "ray") if where == "by-ray" else ()))
    assert content(strangers / "by-ray") == content(strangers / "swept")


def _run_console(folder: Path, *arguments: str) -> None:
    """Run the console script from where pip puts it, which is where Python looks first."""
    script = folder / "bin" / "tokentwin"
    script.parent.mkdir(exist_ok=True)
    script.write_text(_CONSOLE)
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_dash_m_looks_for_our_modules_beside_the_package(strangers: Path) -> None:
    for name in ("tokentwin", "pickle", "random"):  # found before a line of ours is run
        (strangers / f"{name}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "tokentwin", "simulate", "trace.csv", "--gpu", "H100", "-o", "run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_packages_that_are_not_installed_are_found_by_the_processes_they_start(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr("site.getsitepackages", list)
    assert module_environment()["PYTHONPATH"] == str(HOME)
    monkeypatch.setenv("PYTHONPATH", "first")
    assert module_environment()["PYTHONPATH"] == os.pathsep.join(["first", str(HOME)])
    monkeypatch.setattr("site.getsitepackages", lambda: [str(HOME)])
    assert module_environment()["PYTHONPATH"] == "first", "ahead of Python's own it would hide some of those"
    done = subprocess.run(
        module_command("tokentwin", "--version"), env=module_environment(), cwd=tmp_path, capture_output=True, text=True
    )
    assert "version" in done.stdout
