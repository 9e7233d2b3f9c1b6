"""JSON documents that are complete or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokentwin.serving.whole_file import whole_file


def write_json(path: Path, document: Any) -> None:
    """Write the document to a temporary file and move it to `path`. Raises ValueError for NaN and infinities."""
    text = json.dumps(document, allow_nan=False)
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the document; None if there is none, or the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
