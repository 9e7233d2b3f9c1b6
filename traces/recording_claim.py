"""The claim of a process on a recording's directory.

One process at a time may write there, and it may replace nothing but a recording.
"""

from __future__ import annotations

from pathlib import Path

from serving.errors import UserError, reason
from serving.whole_file import LOCK, DirectoryLock
from traces.column_dictionary import FILE as COLUMNS
from traces.schema import DATASETS

WORKLOAD = "workload.parquet"
JOURNAL = "journal"
DEPLOYMENT = "deployment.yaml"  # written with a recording of vLLM, for people to use again


def claim(path: Path, overwrite: bool) -> tuple[bool, DirectoryLock]:
    """Check that `path` can take a recording, and lock it; the flag is True if the directory was made for it."""
    made = not path.exists()
    if not made and not path.is_dir():
        raise UserError("recording", str(path), "is a file; choose a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(path, "recording")
    except OSError as error:
        raise UserError("recording", str(path), f"cannot be made: {reason(error)}") from None
    try:
        if (path / JOURNAL).exists() and not overwrite:
            remedy = "holds what a killed `tokentwin serve` recorded; start it again there, or choose another"
            raise UserError("recording", str(path), remedy)
        if (path / "runs.parquet").exists():
            if not overwrite:
                remedy = "exists; use --force (overwrite in Python) to replace it, or choose another name"
                raise UserError("recording", str(path), remedy)
        elif any(not _ours(child.name) for child in path.iterdir()):
            raise UserError("recording", str(path), "holds other files; choose another directory")
        for partial in path.glob(".*.partial"):  # left by a run that was killed
            partial.unlink()
    except BaseException:
        lock.close()
        raise
    return made, lock


def _ours(name: str) -> bool:
    known = name in (WORKLOAD, COLUMNS, JOURNAL, LOCK, DEPLOYMENT) or name.removesuffix(".parquet") in DATASETS
    return known or name.endswith(".partial")
