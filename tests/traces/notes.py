"""Recordings with other notes than their writer made."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.traces.recording import Recording, notes_of


def add_notes(directory: Path, **notes: Any) -> None:
    """Add to the notes of a recording, or replace notes of the same name."""
    recording, path = Recording.load(directory), directory / "runs.parquet"
    runs = pq.read_table(path)
    at = runs.schema.get_field_index("notes")
    text = json.dumps({**notes_of(recording.run), **notes})
    pq.write_table(runs.set_column(at, runs.schema.field(at), pa.array([text])), path)
