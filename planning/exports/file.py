"""A file that is written whole or not at all, and never over another one without `overwrite`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from serving.errors import UserError, reason
from serving.whole_file import whole_file


def check_free(path: Path, overwrite: bool = False) -> None:
    """Raises UserError if the file exists and `overwrite` is not set, or if it is no file."""
    if path.exists() and not (overwrite and path.is_file()):
        remedy = "exists; use --force (overwrite in Python) to replace it, or choose another name"
        raise UserError("output", str(path), remedy)


def write_whole(path: Path, write: Callable[[IO[bytes]], object], overwrite: bool = False) -> None:
    """Have `write` fill a file beside `path`, then move it there. Raises UserError where that cannot be."""
    check_free(path, overwrite)
    try:
        with whole_file(path) as partial, partial.open("wb") as out:
            write(out)
    except OSError as error:
        raise UserError("output", str(path), f"cannot be written: {reason(error)}") from None
