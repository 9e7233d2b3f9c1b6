"""The recordings that a side of a comparison consists of."""

from __future__ import annotations

from pathlib import Path

from serving.errors import UserError
from traces.recording import Recording


def recordings(side: str, path: str | Path) -> list[Recording]:
    """The recording `path`, or those in it by name. Raises UserError when there is none, or one was cut short."""
    folder = Path(path)
    found = [folder] if (folder / "runs.parquet").exists() else sorted(p.parent for p in folder.glob("*/runs.parquet"))
    if not found:
        raise UserError(side, str(path), "is not a recording: it has no runs.parquet")
    loaded = [Recording.load(place) for place in found]
    for recording in loaded:
        if recording.run["status"] != "complete":
            remedy = f"is {recording.run['status']}; give a recording that ran to its end"
            raise UserError(side, str(recording.path), remedy)
    return loaded
