"""The interface between the engine and a kind of hardware: it decides where and when steps run.

A step is *submitted* as a piece of work. On CUDA it is enqueued and the call returns. On the CPU it runs at once, or,
for the overlapped loop, on a thread that takes steps in order as a CUDA stream does. All other code of the engine is
the same on both, so the first run on a GPU is not the first run of that code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from realengine.devices.speed import Speed

LOOK_EVERY_S = 0.05  # interval at which a device that is waited for calls `watch`
_UNTIMED = nullcontext()


class Memory(NamedTuple):
    """Bytes of the device's memory."""

    free: int
    total: int


class Mark(Protocol):
    """A point in the device's work.

    Attributes:
        thread_ns: CPU time, until this point, of the thread that does the work; None if the CPU does not do it
    """

    thread_ns: int | None

    def ns(self) -> int:
        """Return when the device passed it, on `perf_counter_ns`.

        It may be called only after a wait for the work that it belongs to.
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
        asynchronous: whether `submit` returns before the work is done
        multiprocessors: independent units that a kernel should fill
        watch: called now and then while the host waits for the device, with the seconds that it has waited so far; an
            exception from it ends the wait
    """

    torch_device: torch.device
    asynchronous: bool
    multiprocessors: int
    watch: Callable[[float], None] | None

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's tensors and computations are in order with submitted work."""

    def submit(self, work: Callable[[], None]) -> Pending: ...

    def mark(self) -> Mark:
        """Return a mark at this point of the work; it is called from within the work."""

    def speed(self, work: Callable[[], object]) -> Speed:
        """Return a probe of the device's speed; it may run `work`, a fixed piece of what steps do."""

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return `work` as a graph, whose call runs the same kernels on the same memory with its current content.

        Both this and the graph are called from within submitted work.
        """

    def release_graphs(self) -> None:
        """Release every graph at once, whoever still has it; none may be called afterwards. It waits for nothing."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """Return int32 host memory `[size]` that can be copied to and from the device without waiting."""

    def memory(self) -> Memory: ...

    def used_bytes(self) -> int:
        """Return the bytes in use, without memory that can be released.

        On a shared device they are this process's own.
        """

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the most memory that `work` needed at once, beyond what was in use before it."""

    def synchronize(self) -> None:
        """Wait for everything submitted."""

    def close(self) -> None:
        """Release threads and graphs; nothing may be submitted afterwards.

        It waits for nothing, and may be called again.
        """


class OpTimes:
    """The time of a step, operation by operation: `with times("attention"): ...`.

    `mark` makes marks before and after each operation, or each of `ops`. Without it nothing is timed, which costs next
    to nothing and may be captured in a graph.
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
        """Return ns by operation; the step must have been waited for."""
        totals: dict[str, int] = {}
        for op, start, end in self._spans:
            totals[op] = totals.get(op, 0) + end.ns() - start.ns()
        return totals
