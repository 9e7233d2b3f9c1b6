"""A directory that one writer has at a time. Its lock is the system's, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from serving.errors import UserError

LOCK = ".tokentwin.lock"


class DirectoryLock:
    """The lock on `directory`, held until `close`.

    Raises UserError of `field` while another writer has the directory, and OSError if no file can be made in it.
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
            self._file.close()  # the locked file is the one that the holder before has just removed

    def close(self) -> None:
        """Release the directory for other writers."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()
