"""Messages from a pipe, read by a thread, so that neither end waits for the other to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import Any


class Inbox:
    """The messages of `pipe` that nobody has taken yet."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._came: deque[Any] = deque()  # None is the end of the pipe
        self._arrived = Condition()
        Thread(target=self._read, name="pipe", daemon=True).start()

    def _read(self) -> None:
        message: Any = ()
        while message is not None:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                message = None
            except Exception as error:  # it cannot be unpickled here
                message = error
            with self._arrived:
                self._came.append(message)
                self._arrived.notify()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until a message has come, or for `seconds`; return whether one has."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._came), seconds)

    def take(self) -> Iterator[Any]:
        """Yield the messages that have come. Raise EOFError after the last, and the error of one that is unreadable."""
        while self._came:
            message = self._came.popleft()
            if message is None:
                raise EOFError
            if isinstance(message, Exception):
                raise message
            yield message

    def next(self) -> Any:
        """Return the next message, which may take a while."""
        self.wait()
        return next(self.take())
