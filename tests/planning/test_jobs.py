"""Jobs: found again by their settings, one process for each, and nothing lost when they are killed."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_plan_workers import group
from tests.tokentwin.test_full_disk import disk_of
from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.planning.jobs.job import DIED, Job, Status, finished
from tokentwin.planning.progress import TimeLeft
from tokentwin.serving.errors import UserError

TASK = "tests.planning.tiny_job:tiny"


def until(condition: Callable[[], Any], seconds: float = 240) -> Any:
    """What `condition` gives as soon as that is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
    return value


def waiting(root: Path, **settings: Any) -> Job:
    """A job that was started, and now waits to be let go."""
    job = Job(root, TASK, {"number": 1, "wait": True, **settings})
    job.start()
    until(lambda: job.status.stage == "waiting")
    return job


def end(process: Path) -> None:
    with suppress(ProcessLookupError, TypeError):
        os.killpg(read_json(process), signal.SIGKILL)


def starts(job: Job) -> int:
    return len((job.directory / "starts").read_text().split())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A place for jobs; none of their processes outlives the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield tmp_path
    for path in tmp_path.glob("*/process.json"):
        end(path)


def test_a_job_goes_from_absent_to_done_and_says_how_far_it_is(root: Path) -> None:
    job = Job(root, TASK, {"number": 21, "wait": True})
    assert job.status.state == "absent" and job.result is None
    job.start()
    assert job.status.state in ("queued", "running")
    status = until(lambda: (s := job.status).stage == "waiting" and s)
    assert (status.state, status.share) == ("running", 0.25)
    assert status.eta_s is None, "nothing tells after so short a time"
    (job.directory / "go").touch()
    until(lambda: job.status.state == "done")
    assert job.result == {"answer": 42}
    job.start()
    assert starts(job) == 1, "done is done"


def test_a_job_is_found_by_what_it_was_asked_and_nothing_else(root: Path) -> None:
    job = waiting(root, number=3)
    again = Job(root, TASK, dict(reversed(job.settings.items())))
    other = Job(root, TASK, {**job.settings, "number": 4})
    assert again.id == job.id and again.status.state == "running"
    assert other.id != job.id and other.status.state == "absent"


def test_different_questions_do_not_disturb_each_other(root: Path) -> None:
    first, second = waiting(root, number=1), Job(root, TASK, {"number": 2, "wait": True})
    second.start()
    first.cancel()
    (second.directory / "go").touch()
    until(lambda: second.status.state == "done")
    assert (first.status.state, second.result) == ("cancelled", {"answer": 4})


def test_of_several_starters_at_once_one_starts_it(root: Path) -> None:
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from tokentwin.planning.jobs.job import Job
        Job(Path({str(root)!r}), {TASK!r}, {{"number": 1, "wait": True}}).start()
        """
    )
    for starter in [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]:
        assert starter.wait(60) == 0
    job = Job(root, TASK, {"number": 1, "wait": True})
    until(lambda: job.status.stage == "waiting")
    (job.directory / "go").touch()
    until(lambda: job.status.state == "done")
    assert starts(job) == 1


def test_who_started_it_may_be_killed(root: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tokentwin.planning.jobs.job import Job
Job(Path({str(root)!r}), {TASK!r}, {{"number": 5, "wait": True}}).start()
os.killpg(os.getpgid(0), signal.SIGKILL)
"""
    starter = subprocess.run([sys.executable, "-c", script], start_new_session=True)
    assert starter.returncode == -signal.SIGKILL
    job = Job(root, TASK, {"number": 5, "wait": True})
    until(lambda: job.status.stage == "waiting")
    (job.directory / "go").touch()
    until(lambda: job.status.state == "done")
    assert job.result == {"answer": 10}


def test_cancel_ends_the_process_and_its_children(root: Path) -> None:
    job = waiting(root, child=True)
    worker, child = (read_json(job.directory / name) for name in ("process.json", "child.json"))
    assert {worker, child} <= set(group(worker))
    job.cancel()
    until(lambda: not group(worker))
    assert (job.status.state, job.status.error, job.result) == ("cancelled", "cancelled", None)
    (job.directory / "go").touch()
    job.start()
    until(lambda: job.status.state == "done")


def test_a_job_whose_process_was_killed_is_said_to_be_so_and_can_be_started_again(root: Path) -> None:
    job = waiting(root, child=True)
    os.kill(read_json(job.directory / "process.json"), signal.SIGKILL)  # which leaves its child alive
    until(lambda: not job.status.active)
    assert (job.status.state, job.status.error) == ("failed", DIED)
    (job.directory / "go").touch()
    job.start()
    until(lambda: job.status.state == "done")
    assert starts(job) == 2


def test_a_process_that_got_the_number_of_ours_is_not_taken_for_it(root: Path) -> None:
    job = waiting(root)
    os.kill(read_json(job.directory / "process.json"), signal.SIGKILL)
    write_json(job.directory / "process.json", os.getpgid(0))
    until(lambda: job.status.state == "failed")
    job.cancel()  # which must not end this test
    assert job.status.error == DIED
    (job.directory / "process.json").unlink()


def test_a_mistake_is_one_line_and_a_bug_says_where_to_look(root: Path) -> None:
    mistaken, broken, odd = (
        Job(root, TASK, settings) for settings in ({"mistake": "-1"}, {"bug": True}, {"nan": True})
    )
    for job in (mistaken, broken, odd):
        job.start()
    until(lambda: not any(job.status.active for job in (mistaken, broken, odd)))
    assert mistaken.status.state == broken.status.state == odd.status.state == "failed"
    assert odd.status.error.startswith("a bug: ValueError")
    assert mistaken.status.error == str(UserError("rate", "-1", "is no rate"))
    assert broken.status.error.startswith("a bug: ZeroDivisionError: two lines") and "log.txt" in broken.status.error
    assert "Traceback" in (broken.directory / "log.txt").read_text()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        '{"state',
        "null",
        "7",
        "[]",
        "{}",
        '["a", "b"]',
        '{"state": "?", "error": 1}',
        '{"task": "tests.planning.tiny_job:tiny"}',
        '{"task": "tests.planning.tiny_job:tiny", "settings": 7}',
        '{"task": "tests.planning.tiny_job:tiny", "settings": {"rate": NaN}}',
        "[" * 100_000,
    ],
)
def test_damaged_files_are_as_good_as_none(root: Path, damage: str) -> None:
    job = waiting(root)
    for name in ("progress.json", "outcome.json", "result.json.partial"):
        (job.directory / name).write_text(damage)
    assert job.status.active
    process = job.directory / "process.json"
    end(process)
    until(lambda: not job.status.active)
    assert job.status == Status("failed", error=DIED)
    process.write_text(damage)
    assert job.status == Status("failed", error=DIED)
    (job.directory / "request.json").write_text(damage)
    assert finished(root, TASK) == []
    process.unlink()


def test_a_damaged_result_is_made_anew(root: Path) -> None:
    job = Job(root, TASK, {"number": 8})
    job.start()
    until(lambda: job.status.state == "done")
    (job.directory / "result.json").write_text('{"answer": 1')
    until(lambda: job.status.state == "failed")
    assert finished(root, TASK) == []
    job.start()
    until(lambda: job.status.state == "done")
    assert job.result == {"answer": 16} and starts(job) == 2


def test_a_job_is_found_though_its_starter_was_killed_before_it_could_say(root: Path) -> None:
    job = Job(root, TASK, {"number": 1, "wait": True})
    job.start()
    (job.directory / "process.json").unlink(missing_ok=True)
    until(lambda: job.status.stage == "waiting")


def test_a_full_disk_is_a_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk_of(1 << 20):
        job = Job(root, TASK, {"number": 1, "fill": True})
        job.start()
    until(lambda: not job.status.active)
    assert job.status.error.endswith("cannot be read or written: File too large")
    monkeypatch.setattr("tokentwin.planning.jobs.files.Path.replace", full)
    with pytest.raises(OSError, match="No space left"):
        Job(root, TASK, {"number": 2}).start()
    assert not list(root.rglob("*.partial"))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_documents_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError):
        write_json(path, {"new": float("nan")})
    assert read_json(path) == {"old": 1}
    path.write_text('{"cut of')
    assert read_json(path) is None and read_json(tmp_path / "none.json") is None


def test_finished_jobs_of_a_task_the_last_asked_first(root: Path) -> None:
    assert finished(root, TASK) == []
    for number in (1, 2):
        job = Job(root, TASK, {"number": number})
        job.start()
        until(lambda job=job: job.status.state == "done")
    waiting(root, number=3)
    assert [job.result for job in finished(root, TASK)] == [{"answer": 4}, {"answer": 2}]
    assert finished(root, "tests.planning.test_jobs:another") == []


def test_the_time_left_is_what_the_pace_says_and_never_rises() -> None:
    """Half done after a minute, then nothing for two: the estimate stays, until it is far too short to be told."""
    left = TimeLeft(100.0)
    assert left(0.05, 130.0) is None and left(0.5, 101.0) is None
    assert left(0.5, 160.0) == 60.0
    assert [left(0.5, 160.0 + s) for s in (20, 60)] == [60.0, 60.0] and left(0.5, 300.0) is None
    assert left(0.9, 307.0) == pytest.approx(23.0)
    told = [left(0.9 + step / 1000, 307.0 + 3 * step) for step in range(100)]
    assert (known := [seconds for seconds in told if seconds is not None]) == sorted(known, reverse=True)
