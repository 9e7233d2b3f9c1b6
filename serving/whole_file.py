"""A file that is there in full or not at all, whatever ends the process that writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to be written to; it takes the place of `path` at the end, and after an error is gone."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # where nothing could be written there is nothing to remove
            partial.unlink(missing_ok=True)
