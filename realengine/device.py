"""Where steps run, and when: the one seam between the engine and a kind of hardware.

A step is *submitted* as a piece of work. On CUDA it is enqueued and the call returns; on the CPU it runs at once, or,
for the overlapped loop, on a thread that takes steps in order as a CUDA stream does. Everything else of the
engine is the same code on both, so that the first run on a GPU is not the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from realengine.speed import Speed

LOOK_EVERY_S = 0.05  # how often a device that is waited for lets `watch` look round


class Memory(NamedTuple):
    """Bytes of the device's memory."""

    free: int
    total: int


class Mark(Protocol):
    """A point in the device's work.

    thread_ns  CPU time until then of the thread that does the work; None where the CPU does not do it
    """

    thread_ns: int | None

    def ns(self) -> int:
        """When the device passed it, on `perf_counter_ns`. Only after the work it belongs to was waited for."""


class Pending(Protocol):
    """Submitted work."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> None:
        """Block until it is done; raises what the work raised, or what the device's `watch` raises meanwhile."""


class Device(Protocol):
    """One place to run steps. Work runs in the order in which it is submitted, whatever thread submits it.

    torch_device     where tensors live
    asynchronous     whether `submit` returns before the work is done
    multiprocessors  independent units that a kernel should fill
    watch            called now and then while the host waits for the device, with the seconds that it has waited so
                     far; what it raises ends the wait
    """

    torch_device: torch.device
    asynchronous: bool
    multiprocessors: int
    watch: Callable[[float], None] | None

    def current(self) -> AbstractContextManager[object]:
        """Within it, what this thread makes and computes is in order with what is submitted."""

    def submit(self, work: Callable[[], None]) -> Pending: ...

    def mark(self) -> Mark:
        """A mark at this point of the work; called from within it."""

    def speed(self, work: Callable[[], object]) -> Speed:
        """How fast the device is; `work`, a fixed piece of what steps do, may be run to find out."""

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`work` as a graph: calling it runs the same kernels on the same memory, with what is there by then.

        Both this and the graph are called from within submitted work.
        """

    def release_graphs(self) -> None:
        """Give back every graph at once, whoever still holds it; none may be called afterwards. Waits for nothing."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """int32 host memory `[size]` that can be copied to and from the device without waiting."""

    def memory(self) -> Memory: ...

    def held_bytes(self) -> int:
        """Memory that is taken, without what can be given back. Where others share it, this process's alone."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most memory that `work` needed at once, beyond what was in use before it."""

    def synchronize(self) -> None:
        """Wait for everything submitted."""

    def close(self) -> None:
        """Give back threads and graphs; nothing may be submitted afterwards. Waits for nothing; may be called again."""
