"""JSON documents that are there in full or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write beside its place, then move it there. NaN and infinities are refused (ValueError): JSON has none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> Any:
    """The document; None if there is none, or what lies there is not JSON (no file of ours)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
