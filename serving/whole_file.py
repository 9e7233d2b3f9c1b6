"""Files that are written as a whole, and directories with one writer at a time.

A whole file exists in full or not at all, even if its writer is killed. It replaces another file only on request. The
lock on a directory belongs to the operating system, and ends with the process that holds it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from tokentwin.serving.errors import UserError, reason

LOCK = ".tokentwin.lock"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to. At the end the file replaces `path`; on an error it is removed.

    Temporary files of processes that were killed are removed, too.
    """
    for left in path.parent.glob(f".{escape(path.name)}.*.partial"):
        if _has_ended(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # an unwritable folder leaves nothing to remove
            partial.unlink(missing_ok=True)


def check_free(path: Path, overwrite: bool = False) -> None:
    """Raise UserError if `path` exists and `overwrite` is not set, if it is not a file, or if its folder is missing."""
    if not path.parent.is_dir():
        raise UserError("output", str(path), f"cannot be written: there is no folder {path.parent}; make it first")
    if path.exists() and not (overwrite and path.is_file()):
        remedy = "exists; use --force (overwrite in Python) to replace it, or choose another name"
        raise UserError("output", str(path), remedy)


def write_whole(path: Path, write: Callable[[Path], object], overwrite: bool = False) -> None:
    """Let `write` make a temporary file beside `path`, then move it to `path`. Raises UserError if that fails."""
    check_free(path, overwrite)
    try:
        with whole_file(path) as partial:
            write(partial)
    except OSError as error:
        raise UserError("output", str(path), f"cannot be written: {reason(error)}") from None


def _has_ended(process: str) -> bool:
    """Return whether there is no process with this id any more."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, OSError):  # not one of our files, or another user's process
        return False
    return False


class DirectoryLock:
    """The lock on `directory`, held until `close`.

    Raises UserError about `field` if another writer holds the lock, and OSError if no file can be made in it.
    """

    def __init__(self, directory: Path, field: str) -> None:
        self._path = directory / LOCK
        while True:
            self._file = self._path.open("w")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                remedy = "is being written by another process; wait for it, or choose another directory"
                raise UserError(field, str(directory), remedy) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                    return
            self._file.close()  # the locked file was just removed by the previous holder

    def close(self) -> None:
        """Release the directory for other writers."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()
