"""One job seen from outside: its settings, progress and result, and functions that start and cancel it.

request.json   task and settings
process.lock   locked by the job's process as long as the process lives
process.json   id of the process, which leads its own process group
progress.json  stage, share of the work done, and seconds left
outcome.json   reason for an end without a result: failed or cancelled
result.json    result; a job with a result is done, whatever other files exist
log.txt        output of the process
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.serving.python_process import module_command, module_environment
from tokentwin.serving.version import __version__

Seen = TypeVar("Seen")
State = Literal["absent", "queued", "running", "done", "failed", "cancelled"]
DIED = "its process ended before the job was done; start the job again"


@dataclass(frozen=True)
class Status:
    """The state of a job.

    Attributes:
        share: share of all its work that is done
        eta_s: estimated seconds until the end; None without an estimate
        error: reason of a failure in one line
    """

    state: State
    stage: str = ""
    share: float = 0.0
    eta_s: float | None = None
    error: str = ""

    @property
    def active(self) -> bool:
        """True if a process is working on the job."""
        return self.state in ("queued", "running")


class Job:
    """The job of a task and its settings. Every process that asks for the same task and settings finds the same job.

    Attributes:
        task: `module:function`, called with the settings, the job's directory and a `tokentwin.planning.progress.Tell`
        settings: settings as plain JSON; together with the task and the version of tokentwin they decide the result
    """

    def __init__(self, root: Path, task: str, settings: Mapping[str, Any]) -> None:
        self.task, self.settings = task, dict(settings)
        named = json.dumps([task, self.settings, __version__], sort_keys=True, allow_nan=False)
        self.id = hashlib.sha256(named.encode()).hexdigest()[:16]
        self.directory = root / self.id

    @property
    def result(self) -> Any:
        """The result; None if the job is not done."""
        return read_json(self.directory / "result.json")

    def document(self, name: str) -> Any:
        """Return a document that the task has written so far; None if there is none."""
        return read_json(self.directory / name)

    @property
    def status(self) -> Status:
        """The status, from the job's files and from the lock of its process. A damaged file counts as missing."""
        ended = self._ended
        if ended is not None:
            return ended
        if not self._lock.exists():
            return Status("absent")
        if not self._alive:
            return self._ended or Status("failed", error=DIED)  # the process may have succeeded since the first check
        return self._read("progress.json", _under_way) or Status("queued")

    def start(self) -> None:
        """Start the job, unless it is done or under way. If several callers start it at once, it is started once."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._starting():
            status = self.status
            if status.active or status.state == "done":
                return
            for name in ("outcome.json", "progress.json", "process.json"):
                (self.directory / name).unlink(missing_ok=True)
            write_json(self.directory / "request.json", {"task": self.task, "settings": self.settings})
            with (self.directory / "log.txt").open("w") as log, self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                process = subprocess.Popen(
                    module_command("tokentwin.planning.jobs.worker", str(self.directory.resolve())),
                    env=module_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[lock.fileno()],  # it inherits the lock, which is released when its last holder ends
                    start_new_session=True,  # outlives the server, and can be ended with all of its children
                )
            # A thread waits for the process, so that it does not remain as a zombie while a server runs for months.
            threading.Thread(target=process.wait, daemon=True).start()
            try:
                write_json(self.directory / "process.json", process.pid)
            except OSError:
                _end_group(process.pid)  # no process.json names the process, so no caller could find it
                raise

    def cancel(self) -> None:
        """End the job's process and all its children; a result that already exists stays."""
        if not self.directory.is_dir():
            return
        with self._starting():
            process = read_json(self.directory / "process.json")
            if not isinstance(process, int) or not self.status.active:
                return
            _end_group(process)
            write_json(self.directory / "outcome.json", {"state": "cancelled", "error": "cancelled"})

    @property
    def _ended(self) -> Status | None:
        return self._read("result.json", lambda _: Status("done", share=1.0)) or self._read("outcome.json", _outcome)

    @property
    def _lock(self) -> Path:
        return self.directory / "process.lock"

    @property
    def _alive(self) -> bool:
        """True if the job's process is alive: no other process can then take the lock."""
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def _read(self, name: str, seen: Callable[[Any], Seen]) -> Seen | None:
        """Return the content of a file; None if the file is missing or has other content."""
        document = read_json(self.directory / name)
        try:
            return None if document is None else seen(document)
        except (KeyError, TypeError, ValueError):
            return None

    @contextmanager
    def _starting(self) -> Iterator[None]:
        with (self.directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def finished(root: Path, task: str) -> list[Job]:
    """Return the jobs of `task` that have a result, the most recently started job first."""
    return [job for job in started(root, task) if job.status.state == "done"]


def started(root: Path, task: str) -> Iterator[Job]:
    """Yield the jobs of `task` that were ever started, the most recently started job first."""
    paths = sorted(root.glob("*/request.json"), key=lambda path: (-path.stat().st_mtime_ns, path.parent.name))
    for path in paths:
        request = read_json(path)
        settings = request.get("settings") if isinstance(request, dict) else None
        if not isinstance(settings, dict) or request["task"] != task:
            continue
        job = Job(root, task, settings)
        # A job in another directory belongs to another version of tokentwin, and may have another result.
        if job.directory == path.parent:
            yield job


def _end_group(leader: int) -> None:
    """Kill a process and its whole process group. Does nothing if the process is gone."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _outcome(outcome: Any) -> Status:
    if outcome["state"] not in ("failed", "cancelled"):
        raise ValueError(outcome["state"])
    return Status(outcome["state"], error=str(outcome["error"]))


def _under_way(progress: Any) -> Status:
    stage, share, left_s = str(progress["stage"]), float(progress["share"]), progress["left_s"]
    return Status("running", stage, share, None if left_s is None else float(left_s))
