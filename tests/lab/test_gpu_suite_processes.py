"""Phases as processes: one that crashes, hangs or raises costs itself, and nothing of what was measured is lost."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from lab.gpu_suite.page import faults, undone
from lab.gpu_suite.recorded_runs import pack, unpack
from lab.gpu_suite.results import FILE, Results, ceilings_of, load, progress_of
from lab.gpu_suite.sizes import dry_sizes
from lab.gpu_suite.suite import Phase, Suite, Work, run_apart
from lab.gpu_suite.units import OutOfTime, Unit

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


def phase(run: Callable[[Work], None], **about: object) -> Phase:
    """Return a phase of one unit."""
    return Phase(run.__name__, 1.0, lambda work: [partial(run, work)], **about)  # type: ignore[arg-type]


def test_a_phase_that_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    after: list[str] = []
    runs: list[Callable[[Work], None]] = [crashing, aborting, hanging, raising, leaving, good]
    phases = [phase(run, after=lambda work: after.append("after")) for run in runs]
    Suite(tmp_path, phases, 0.05, dry_sizes(), grace_s=0.5).run()
    results = load(tmp_path)
    assert [row["number"] for row in results["rows"]] == [1, 2, 3]
    errors = {row["phase"]: row["error"] for row in results["failures"]}
    assert errors["crashing"] == "ended by SIGSEGV"
    assert errors["aborting"] == "ended by SIGABRT"
    assert errors["hanging"].startswith("killed: not done after")
    assert errors["raising"].startswith("ValueError: no such thing (test_gpu_suite_processes.py:")
    assert errors["leaving"] == "ended with exit code 7"
    assert len(faults(results)) == len(errors) == 5
    assert [progress_of(results, run.__name__).done for run in runs] == [0, 0, 0, 0, 0, 1]
    assert len(undone(results)) == 5
    assert len(after) == 6
    assert ends(results["child"])


def test_a_phase_goes_on_in_a_new_process_after_a_unit_that_broke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception, a dead process, and an error that was caught and has left every later call failing."""
    lost = []
    monkeypatch.setattr("lab.gpu_suite.suite.context_is_lost", lambda: bool(lost))

    def units(work: Work) -> list[Unit]:
        def measured(number: int) -> list[dict[str, object]]:
            if number == 2:
                raise ValueError("a bad unit")
            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 6:
                lost.append("an illegal memory access, which the measurement has caught")
            return [{"number": number, "error": lost[0] if lost else None}]

        return [partial(measured, number) for number in range(9)]

    Suite(tmp_path, [Phase("many", 1.0, units)], 5.0, dry_sizes()).run()
    results = load(tmp_path)
    assert [row["number"] for row in results["many"]] == [0, 1, 3, 5, 6, 7, 8]
    assert [row["number"] for row in results["many"] if row["error"]] == [6]  # those after it are not poisoned
    assert [row["unit"] for row in results["failures"]] == [3, 5, 7]
    assert progress_of(results, "many")[:4] == (9, 9, 9, 7)
    assert undone(results) == ["many: 7 of 9 done"]


def test_a_phase_in_which_nothing_works_is_given_up(tmp_path: Path) -> None:
    Suite(tmp_path, [Phase("hopeless", 1.0, lambda work: [partial(raising, work)] * 50)], 5.0, dry_sizes()).run()
    results = load(tmp_path)
    assert [row["error"][:10] for row in results["failures"]] == ["ValueError"] * 3 + ["given up: "]
    assert undone(results) == ["hopeless: 0 of 50 done"]


def test_a_suite_without_time_says_what_it_did_not_do(tmp_path: Path) -> None:
    """The units of a phase are counted even if its time is up before it begins; one of them may need more time."""

    def long(work: Work) -> None:
        raise OutOfTime

    def slow(work: Work) -> None:
        time.sleep(max(work.left(), 0) + 0.1)

    phases = [Phase(run.__name__, 1.0, lambda work, run=run: [partial(run, work)] * 4) for run in (long, slow, good)]
    phases[2] = phases[2]._replace(minutes=1e-6)
    Suite(tmp_path, phases, 0.05, dry_sizes(), grace_s=5.0).run()
    results = load(tmp_path)
    assert undone(results) == ["long: 0 of 4 done", "slow: 1 of 4 done", "good: 0 of 4 done"]
    assert faults(results) == []


def test_a_clock_that_falls_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1.0, 0.98, 1.0, 0.97, 0.9, 0.5, 0.5, 0.49])
    monkeypatch.setattr("lab.gpu_suite.suite.find_clock", lambda device: lambda: next(clocks))
    Suite(tmp_path, [Phase("falling", 1.0, lambda work: [partial(good, work)] * 4)], 5.0, dry_sizes()).run()
    results = load(tmp_path)
    assert progress_of(results, "falling")[3:] == (4, 0.49, 2)
    assert undone(results) == ["falling: 2 of 4 measured at a clock below 60% of the highest"]


def test_time_that_a_phase_does_not_need_is_for_those_after_it(tmp_path: Path) -> None:
    def left(work: Work) -> None:
        work.results.add("left", work.left())

    first = Phase("a", 1.0, lambda work: [partial(left, work)])
    Suite(tmp_path, [first, first._replace(name="b", minutes=3.0)], 4.0, dry_sizes()).run()
    one, two = load(tmp_path)["left"]
    assert one == pytest.approx(60, abs=10)
    assert two == pytest.approx(240, abs=20)


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
    Suite(tmp_path, [phase(good)], 1.0, dry_sizes()).run()
    (tmp_path / "recordings-1.tar").write_bytes(b"")
    (tmp_path / "mine.txt").write_text("kept")
    Suite(tmp_path, [phase(good)], 1.0, dry_sizes(), adding=True).run()
    assert len(load(tmp_path)["rows"]) == 2
    Suite(tmp_path, [phase(good)], 1.0, dry_sizes()).run()
    assert len(load(tmp_path)["rows"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", FILE]


def test_a_failure_of_an_earlier_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    Suite(tmp_path, [phase(raising)._replace(name="same")], 1.0, dry_sizes()).run()
    assert faults(load(tmp_path))
    Suite(tmp_path, [phase(good)._replace(name="same")], 1.0, dry_sizes(), adding=True).run()
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
        "phases.PHASES = (Phase('hanging', 1.0, lambda work: [lambda: hanging(work)]),)\n"
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
