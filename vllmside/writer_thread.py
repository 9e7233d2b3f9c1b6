"""A thread that writes a recording, so that no step waits for the disk.

The number of waiting events is bounded. If there are too many, or if anything fails, recording ends with one line in
the log, and the engine runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from tokentwin.serving.errors import UserError, raised
from tokentwin.vllmside.engine_events import Event, Flight

_LOG = logging.getLogger("vllm.tokentwin")  # vLLM shows logs below its own name


class Takes(Protocol):
    """An object that makes a recording from events; `goes_on` is False after a failure."""

    @property
    def goes_on(self) -> bool: ...
    def take(self, event: Event) -> None: ...


class EventWriter(Protocol):
    """A writer that passes events to a `Takes`, until it is closed."""

    goes_on: bool
    closed: bool

    def put(self, event: Event) -> None: ...
    def end(self, why: str) -> None: ...
    def close(self, finish: Callable[[], None], timeout_s: float) -> None: ...


class WriterThread:
    """A thread that passes events to `run` in order. `most_waiting` is the maximum number of waiting step rows."""

    def __init__(self, run: Takes, most_waiting: int) -> None:
        self.goes_on = True
        self.closed = False
        self._run = run
        self._most_waiting = most_waiting
        self._put_rows = 0
        self._taken_rows = 0
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = Thread(target=self._write, name="tokentwin-recorder", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Pass on `event`, unless recording has ended."""
        if self.goes_on:
            self._put_rows += _rows(event)
            if self._put_rows - self._taken_rows > self._most_waiting:
                self.end(f"{self._most_waiting:,} rows wait to be written, which takes too long")
            else:
                self._events.put(event)

    def end(self, why: str) -> None:
        """Stop recording."""
        if self.goes_on:
            self.goes_on = False
            _LOG.error("tokentwin: the recording ends here: %s", why)

    def close(self, finish: Callable[[], None], timeout_s: float) -> None:
        """Write the waiting events and call `finish`; give up after `timeout_s` seconds.

        The limit is needed because the server is about to be killed.
        """
        self.closed = True
        self._events.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.end("it takes too long to write what is left")
            return
        try:
            finish()
        except Exception as error:
            self.end(str(error) if isinstance(error, UserError) else raised(error))

    def _write(self) -> None:
        while (event := self._events.get()) is not None:
            if self.goes_on:
                try:
                    self._run.take(event)
                    self.goes_on = self.goes_on and self._run.goes_on
                except Exception as error:
                    self.end(str(error) if isinstance(error, UserError) else raised(error))
            self._taken_rows += _rows(event)


class SameThread:
    """A writer that passes events to `run` at once, for a caller that waits for results and handles errors."""

    def __init__(self, run: Takes) -> None:
        self.goes_on = True
        self.closed = False
        self._run = run

    def put(self, event: Event) -> None:
        """Pass on `event`."""
        self._run.take(event)

    def end(self, why: str) -> None:
        """Stop recording."""
        self.goes_on = False
        _LOG.error("tokentwin: the recording ends here: %s", why)

    def close(self, finish: Callable[[], None], timeout_s: float) -> None:
        """Call `finish`, without a limit of time."""
        self.closed = True
        finish()


def _rows(event: Event) -> int:
    """Return the memory of `event` in units of step rows; a block's hash is as large as one row."""
    return len(event.ids) if isinstance(event, Flight) else 1 + len(event.keys)
