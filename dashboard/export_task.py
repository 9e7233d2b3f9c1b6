"""A table of a long recording, written to a file by a job, because it would take too long for a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentwin.dashboard.library import stamp
from tokentwin.planning.exports.export import export
from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.progress import Tell

TASK = "tokentwin.dashboard.export_task:write"
MANY = 100_000  # rows from which a job writes a table
_FILE = "export"


def export_job(jobs: Path, source: RecordedRun, format: str, table: str) -> Job:
    """Return the job that writes the table; another job if the recording has changed."""
    path = source.recording.path.resolve()
    return Job(jobs, TASK, {"run": str(path), "stamp": stamp(path), "format": format, "table": table})


def exported(job: Job) -> bytes:
    """Return the bytes that the job has written."""
    return (job.directory / _FILE).read_bytes()


def write(settings: dict[str, Any], out: Path, tell: Tell) -> int:
    """Write the table, and return the size of the file in bytes."""
    tell(f"writing {settings['table']}", 0.0)
    path = out / _FILE
    export(RecordedRun(Path(settings["run"])), settings["format"], path, settings["table"], overwrite=True)
    return path.stat().st_size
