"""The interface between the engine and a kind of hardware, which decides where and when steps run.

A step is *submitted* as a piece of work. On CUDA it is enqueued and the call returns. On the CPU it runs at once, or,
for the overlapped loop, on a thread that takes steps in order as a CUDA stream does. All other code of the engine is
the same on CUDA and on the CPU, so tests on a CPU also cover the code that runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from tokentwin.realengine.devices.speed import Speed

LOOK_EVERY_S = 0.05  # interval at which `watch` is called during a wait for the device
_UNTIMED = nullcontext()


class Memory(NamedTuple):
    """Free and total memory of the device in bytes."""

    free: int
    total: int


class Mark(Protocol):
    """A point in the device's work.

    Attributes:
        thread_ns: CPU time in ns, up to this point, of the thread that does the work; None if no CPU thread does the
            work
    """

    thread_ns: int | None

    def ns(self) -> int:
        """Return the time at which the device passed this mark, on `perf_counter_ns`.

        It may be called only after a wait for the work in which the mark was made.
        """


class Pending(Protocol):
    """Submitted work."""

    def done(self) -> bool:
        """Return whether the work has ended, failed or not."""

    def wait(self) -> None:
        """Block until the work is done; raise what it raised, or what the device's `watch` raises meanwhile."""


class Device(Protocol):
    """A place to run steps. Work runs in the order in which it is submitted, whatever thread submits it.

    Attributes:
        torch_device: device of tensors
        asynchronous: True if `submit` returns before the work is done
        multiprocessors: number of independent processing units that a kernel should keep busy
        watch: function called repeatedly while the host waits for the device, with the seconds waited so far; an
            exception from it ends the wait
    """

    torch_device: torch.device
    asynchronous: bool
    multiprocessors: int
    watch: Callable[[float], None] | None

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's tensor operations run in order with submitted work."""

    def submit(self, work: Callable[[], None]) -> Pending: ...

    def mark(self) -> Mark:
        """Return a mark at this point of the work; only submitted work may call this."""

    def speed(self, work: Callable[[], object]) -> Speed:
        """Return a probe of the device's speed; the probe may run `work`, a fixed piece of a step's work."""

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return `work` as a graph; calling it runs the same kernels on the same memory with its current content.

        Only submitted work may call this method and the graph.
        """

    def release_graphs(self) -> None:
        """Release all graphs without waiting, even those that are still referenced; none may be called afterwards."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """Return int32 host memory `[size]` that can be copied to and from the device without waiting."""

    def memory(self) -> Memory: ...

    def used_bytes(self) -> int:
        """Return the number of bytes in use, without memory that can be released.

        On the CPU, which other processes share, only this process's bytes count.
        """

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the peak memory of `work` in bytes, beyond what was in use before it."""

    def synchronize(self) -> None:
        """Wait for all submitted work."""

    def close(self) -> None:
        """Release threads and graphs; nothing may be submitted afterwards.

        It does not wait for work, and may be called more than once.
        """


class OpTimes:
    """The time of a step, operation by operation: `with times("attention"): ...`.

    `mark` is called before and after each operation, or only around the operations named in `ops`. Without `mark`
    nothing is timed. Untimed operations cost next to nothing extra, and may be captured in a graph.
    """

    def __init__(self, mark: Callable[[], Mark] | None = None, ops: Set[str] | None = None) -> None:
        self._mark = mark
        self._ops = ops
        self._spans: list[tuple[str, Mark, Mark]] = []

    def __call__(self, op: str) -> AbstractContextManager[None]:
        if self._mark is None or (self._ops is not None and op not in self._ops):
            return _UNTIMED
        return self._span(op, self._mark)

    @contextmanager
    def _span(self, op: str, mark: Callable[[], Mark]) -> Iterator[None]:
        start = mark()
        yield
        self._spans.append((op, start, mark()))

    def totals(self) -> dict[str, int]:
        """Return the total time of each operation in ns; call it only after a wait for the step."""
        totals: dict[str, int] = {}
        for op, start, end in self._spans:
            totals[op] = totals.get(op, 0) + end.ns() - start.ns()
        return totals
