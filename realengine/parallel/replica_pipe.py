"""The messages on the pipe to a process with one of several engines (ours or vLLM), and their reader.

When its engine is loaded, the process sends `About`. Then it answers calls, each of which is `(name, arguments)`. In
the call `replay` it first sends `Ready` and receives the start of the run, from which times count (ns, on
`perf_counter_ns`). Then it receives `Arrival`s and `HangUp`s, and finally `End`. It sends a `Report` after each step,
and `Ran` at the end.

Nothing here needs torch, so that vLLM's own process can also use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import Any, NamedTuple

from tokentwin.serving.workload import WorkloadRequest


class About(NamedTuple):
    """A description of an engine process.

    Attributes:
        deployment: deployment as JSON, with the number of KV blocks that fit
        num_blocks: number of KV blocks that requests can have
        forces: True if the output of a request can be forced
        memory_report: explanation of the number of KV blocks; empty if not known
    """

    deployment: str
    hardware: dict[str, str | int]
    vocab_size: int
    num_blocks: int
    notes: dict[str, Any]
    forces: bool
    memory_report: str = ""


class Arrival(NamedTuple):
    """Message to a process: a request, which its client sent at `send_ns` of the run.

    `prompt` and `output` are token ids; `output` is None if it is not forced.
    """

    request: WorkloadRequest
    prompt: list[int]
    output: list[int] | None
    send_ns: int


class HangUp(NamedTuple):
    """Message to a process: the client of request `id` has hung up."""

    id: int


class End(NamedTuple):
    """Message to a process: the run is over. Requests that have not ended by then are unfinished."""


class Report(NamedTuple):
    """Message from a process: rows of requests that have ended and of steps, and the step that has just ended, if any.

    Attributes:
        said: outputs that were not forced, by id of the request, which has ended
        step: number of the step that has just ended; None if no step has ended
        sampled: ids of the requests that got tokens in this step, one entry for each token
    """

    requests: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    said: dict[int, list[int]]
    step: int | None = None
    sampled: tuple[int, ...] = ()


class Ready(NamedTuple):
    """First message from a process in a run: it waits for the start of the run."""


class Ran(NamedTuple):
    """Last message from a process in a run: the share of its steps' time that launches took, or None if not known."""

    launching_share: float | None


class Inbox:
    """The messages that have come through `pipe` and were not taken yet."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._came: deque[Any] = deque()  # messages in order; None marks the end of the pipe
        self._arrived = Condition()
        Thread(target=self._read, name="pipe", daemon=True).start()

    def _read(self) -> None:
        message: Any = ()
        while message is not None:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                message = None
            except Exception as error:  # the message cannot be unpickled here
                message = error
            with self._arrived:
                self._came.append(message)
                self._arrived.notify()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until a message has come, but not longer than `seconds`; return whether one has come."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._came), seconds)

    def take(self) -> Iterator[Any]:
        """Yield the messages that have come; raise EOFError at the pipe's end, and the error of an unreadable one."""
        while self._came:
            message = self._came.popleft()
            if message is None:
                raise EOFError
            if isinstance(message, Exception):
                raise message
            yield message

    def next(self) -> Any:
        """Wait for the next message and return it."""
        self.wait()
        return next(self.take())
