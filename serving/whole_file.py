"""A file that is there in full or not at all, whatever ends the process that writes it, and over no other unasked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from serving.errors import UserError, reason


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to be written to; it takes the place of `path` at the end, and after an error is gone.

    What processes that were killed have left of it goes, too.
    """
    for left in path.parent.glob(f".{escape(path.name)}.*.partial"):
        if _has_ended(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # where nothing could be written there is nothing to remove
            partial.unlink(missing_ok=True)


def check_free(path: Path, overwrite: bool = False) -> None:
    """Raises UserError if the file exists and `overwrite` is not set, if it is no file, or if it has no folder."""
    if not path.parent.is_dir():
        raise UserError("output", str(path), f"cannot be written: there is no folder {path.parent}; make it first")
    if path.exists() and not (overwrite and path.is_file()):
        remedy = "exists; use --force (overwrite in Python) to replace it, or choose another name"
        raise UserError("output", str(path), remedy)


def write_whole(path: Path, write: Callable[[Path], object], overwrite: bool = False) -> None:
    """Have `write` make a file beside `path`, then move it there. Raises UserError where that cannot be."""
    check_free(path, overwrite)
    try:
        with whole_file(path) as partial:
            write(partial)
    except OSError as error:
        raise UserError("output", str(path), f"cannot be written: {reason(error)}") from None


def _has_ended(process: str) -> bool:
    """Whether no process has this number any more."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, OSError):  # no file of ours; another user's process
        return False
    return False
