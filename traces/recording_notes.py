"""The `notes` of a run, a JSON object: facts about a recording beyond its columns.

A run of the real engine notes its `attention`, `model`, `memory`, and for a mixture `experts`: the number of experts in
a layer (`experts`) and the number that a token goes to (`topk`). A simulated run notes how far to trust it, once this
is known:

front_door  time that the API server in front of it took, as in `serving.front_door.FrontDoor`
gpu         the GPU whose kernel tables timed its steps
provenance  `mark` and `reason`, as in `calibration.kernels.times.Coverage`
bands       90 % bands by metric and statistic; the statistic of a single number is `value`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serving.errors import UserError, reason
from serving.whole_file import DirectoryLock, whole_file
from traces.recording import Recording

_RUNS = "runs.parquet"


def notes_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of a row of `runs`; empty if it has none or they are no JSON object."""
    try:
        notes = json.loads(run["notes"] or "{}")
    except ValueError:
        return {}
    return notes if isinstance(notes, dict) else {}


def add_notes(directory: str | Path, notes: Mapping[str, Any]) -> None:
    """Add to the notes of a complete recording, or replace notes of the same name.

    Raises UserError when there is no recording or another process is writing one there, ValueError for NaN and
    infinities, which JSON does not have.
    """
    path = Recording.load(directory).path
    try:
        with closing(DirectoryLock(path, "recording")):
            recording = Recording.load(path)
            runs = recording.runs
            text = json.dumps({**notes_of(recording.run), **notes}, allow_nan=False)
            at = runs.schema.get_field_index("notes")
            field = runs.schema.field(at)
            metadata = pq.read_schema(path / _RUNS).metadata
            changed = runs.set_column(at, field, pa.array([text], field.type)).replace_schema_metadata(metadata)
            with whole_file(path / _RUNS) as partial:
                pq.write_table(changed, partial, compression="zstd")
    except OSError as error:
        raise UserError("recording", str(directory), f"cannot be written: {reason(error)}") from None
