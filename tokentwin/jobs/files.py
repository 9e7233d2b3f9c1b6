"""JSON documents that are there in full or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write beside its place, then move it there. NaN and infinities are refused (ValueError): JSON has none."""
    text = json.dumps(document, allow_nan=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk it would keep what little there is
        raise


def read_json(path: Path) -> Any:
    """The document; None if there is none, or what lies there is not JSON (no file of ours)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
