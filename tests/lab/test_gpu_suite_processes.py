"""Phases as processes: one that crashes, hangs or raises costs itself, and nothing of what was measured is lost."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from lab.gpu_suite.page import faults
from lab.gpu_suite.recorded_runs import pack, unpack
from lab.gpu_suite.results import FILE, Results, ceilings_of, load
from lab.gpu_suite.sizes import dry_sizes
from lab.gpu_suite.suite import Phase, Suite, Work, run_apart

pytestmark = pytest.mark.engine


def crashing(work: Work) -> None:
    faulthandler.disable()  # pytest's would fill the screen
    work.results.add("rows", {"number": 1})
    os.kill(os.getpid(), signal.SIGSEGV)


def aborting(work: Work) -> None:
    faulthandler.disable()
    os.abort()


def hanging(work: Work) -> None:
    """A phase that ignores SIGTERM, and has a child process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    work.results.set("child", child.pid)
    work.results.add("rows", {"number": 2})
    time.sleep(600)


def raising(work: Work) -> None:
    raise ValueError("no such thing")


def leaving(work: Work) -> None:
    sys.exit(7)


def good(work: Work) -> None:
    work.results.add("rows", {"number": 3})


def ends(pid: int) -> bool:
    """Return whether process `pid` ends within ten seconds: a signal to a group reaches its processes one by one."""
    for _ in range(200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_phase_that_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    after: list[str] = []
    runs: list[Callable[[Work], None]] = [crashing, aborting, hanging, raising, leaving, good]
    phases = [Phase(run.__name__, 1.0, run, lambda work: after.append("after")) for run in runs]
    Suite(tmp_path, phases, 0.05, dry_sizes(), grace_s=0.5).run()
    results = load(tmp_path)
    assert [row["number"] for row in results["rows"]] == [1, 2, 3]
    assert results["crashing_failed"] == "ended by SIGSEGV"
    assert results["aborting_failed"] == "ended by SIGABRT"
    assert results["hanging_failed"].startswith("killed: not done after")
    assert results["raising_failed"].startswith("ValueError: no such thing (test_gpu_suite_processes.py:")
    assert results["leaving_failed"] == "ended with exit code 7"
    assert "good_failed" not in results
    assert len(faults(results)) == 5
    assert len(after) == 6
    assert ends(results["child"])


def test_time_that_a_phase_does_not_need_is_for_those_after_it(tmp_path: Path) -> None:
    def left(work: Work) -> None:
        work.results.add("left", work.left())

    Suite(tmp_path, [Phase("a", 1.0, left), Phase("b", 3.0, left)], 4.0, dry_sizes()).run()
    first, second = load(tmp_path)["left"]
    assert first == pytest.approx(60, abs=10)
    assert second == pytest.approx(240, abs=20)


def test_a_process_ends_with_its_own_words_or_none(tmp_path: Path) -> None:
    said: list[str] = []
    assert run_apart(lambda: None, 60.0, said.append)
    assert not run_apart(lambda: sys.exit(5), 60.0, said.append)
    assert said == ["ended with exit code 5"]


def test_a_process_that_has_used_cuda_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be forked"):
        run_apart(lambda: None, 1.0, lambda why: None)


def test_a_new_run_begins_anew_and_an_addition_keeps_what_there_is(tmp_path: Path) -> None:
    Suite(tmp_path, [Phase("good", 1.0, good)], 1.0, dry_sizes()).run()
    (tmp_path / "recordings-1.tar").write_bytes(b"")
    (tmp_path / "mine.txt").write_text("kept")
    Suite(tmp_path, [Phase("good", 1.0, good)], 1.0, dry_sizes(), adding=True).run()
    assert len(load(tmp_path)["rows"]) == 2
    Suite(tmp_path, [Phase("good", 1.0, good)], 1.0, dry_sizes()).run()
    assert len(load(tmp_path)["rows"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", FILE]


def test_a_failure_of_an_earlier_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    Suite(tmp_path, [Phase("same", 1.0, raising)], 1.0, dry_sizes()).run()
    assert faults(load(tmp_path))
    Suite(tmp_path, [Phase("same", 1.0, good)], 1.0, dry_sizes(), adding=True).run()
    assert faults(load(tmp_path)) == []


# Results


def test_results_survive_half_a_line(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert results.values == {}
    results.set("a", 1)
    results.add("rows", {"x": [1, None]})
    with (tmp_path / FILE).open("a") as file:
        file.write('\n{"name": "b", "va')
    results.set("a", 2)
    results.add("rows", {"x": []})
    assert results.values == {"a": 2, "rows": [{"x": [1, None]}, {"x": []}]}
    results.set("rows", [])
    results.add("rows", 1)
    assert results.values["rows"] == [1]


def test_what_is_no_results_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("hello\n1\n")
    with pytest.raises(ValueError, match="no line"):
        load(tmp_path)


def test_stand_ins_are_for_what_was_not_measured() -> None:
    results = {"ceilings": [{"ceiling": "copy_bytes_per_s", "value": 1.0, "spread_pct": 0.1}]}
    assert ceilings_of({}) == {"copy_bytes_per_s": 4.3e12, "gemm_flops_per_s": 788e12}
    assert ceilings_of(results) == {"copy_bytes_per_s": 1.0, "gemm_flops_per_s": 788e12}


def test_recordings_are_packed_into_few_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.gpu_suite.recorded_runs._ARCHIVE_BYTES", 40_000)
    out = tmp_path / "out"
    out.mkdir()
    for number in range(5):
        run = tmp_path / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        (run / "steps.parquet").write_bytes(bytes([number]) * 12_000)
        pack(run, out)
    archives = list(out.iterdir())
    assert 2 <= len(archives) < 5 and all(path.suffix == ".tar" for path in archives)
    unpacked = unpack(out, tmp_path / "unpacked")
    assert [path.name for path in unpacked] == [f"run-{number}" for number in range(5)]
    assert (unpacked[3] / "steps.parquet").read_bytes() == bytes([3]) * 12_000


def test_validating_without_recordings_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.gpu_suite", "--validate", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "holds no recordings-N.tar" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_its_phase(tmp_path: Path) -> None:
    """SIGTERM, as of a time limit outside: what the phase under way has started is ended, its results are kept."""
    script = (
        "import signal, sys, lab.gpu_suite.__main__ as command, lab.gpu_suite.phases as phases\n"
        "from tests.lab.test_gpu_suite_processes import hanging\n"
        "from lab.gpu_suite.suite import Phase\n"
        "phases.PHASES = (Phase('hanging', 1.0, hanging),)\n"
        f"sys.argv = ['suite', '--dry-run', '--out', {str(tmp_path)!r}]\n"
        "sys.exit(command.main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2]) as process:
        while "rows" not in Results(tmp_path).values and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    results = load(tmp_path)
    assert json.dumps(results["rows"]) == '[{"number": 2}]'
    assert ends(results["child"])
