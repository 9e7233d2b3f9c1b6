"""The pipe of a process with one of several engines, whichever engine that is: its messages, and their reader.

The process first sends `About`, once its engine is loaded. Each call is `(name, arguments)`, which it answers. In the
call `replay` it sends `Ready`, gets the moment that times count from (ns, on `perf_counter_ns`), and then `Arrival`,
`HangUp` and `End`; it sends `Report` after each step, and at last `Ran`.

Nothing here needs torch, so that vLLM's own process can also use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import Any, NamedTuple

from serving.workload import WorkloadRequest


class About(NamedTuple):
    """A description of an engine process.

    Attributes:
        deployment: deployment as JSON, with the KV blocks that fit
        num_blocks: KV blocks that requests can have
        forces: whether the output of a request can be forced
        memory_report: use of its memory, empty if it is not known
    """

    deployment: str
    hardware: dict[str, str | int]
    vocab_size: int
    num_blocks: int
    notes: dict[str, Any]
    forces: bool
    memory_report: str = ""


class Arrival(NamedTuple):
    """Message to a process: a request, sent at `send_ns` of the run.

    It has token ids of its prompt and, if forced, of its output.
    """

    request: WorkloadRequest
    prompt: list[int]
    output: list[int] | None
    send_ns: int


class HangUp(NamedTuple):
    """Message to a process: nobody waits for request `id` any more."""

    id: int


class End(NamedTuple):
    """Message to a process: nothing more comes. Requests that have not ended by then are unfinished."""


class Report(NamedTuple):
    """Message from a process: rows of requests that have left and of steps, and the step that has just ended, if any.

    Attributes:
        said: outputs, by request that has left and whose output was not forced
        sampled: requests that got a token in it, one entry a token
    """

    requests: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    said: dict[int, list[int]]
    step: int | None = None
    sampled: tuple[int, ...] = ()


class Ready(NamedTuple):
    """First message from a process in a run: it waits for the moment that times count from."""


class Ran(NamedTuple):
    """Last message from a process in a run: the share of its steps' time that launches took, if it is known."""

    launching_share: float | None


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
