"""The CPU as a device: work runs at once, or in order on one thread that stands in for a CUDA stream."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch

from tokentwin.realengine.devices.device import LOOK_EVERY_S, Mark, Memory, Pending
from tokentwin.realengine.devices.speed import Speed, SpeedProbe

_STATUS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class _Passed:
    """A mark, which on the CPU is simply the time."""

    __slots__ = ("_ns", "thread_ns")

    def __init__(self) -> None:
        self.thread_ns: int | None = thread_time_ns()
        self._ns = perf_counter_ns()

    def ns(self) -> int:
        return self._ns


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Queued:
    def __init__(self, future: Future[None], device: CpuDevice) -> None:
        self._future, self._device = future, device

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._device.wait_for(self._future)
        self._future.result()


class CpuDevice:
    """The CPU; if `threaded`, it runs work on its own thread, in order, while the caller goes on."""

    def __init__(self, threaded: bool) -> None:
        self.torch_device = torch.device("cpu")
        self.asynchronous = threaded
        self.multiprocessors = 1
        self.watch: Callable[[float], None] | None = None
        self._thread = ThreadPoolExecutor(1, "device") if threaded else None
        self._last: Future[None] | None = None

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def submit(self, work: Callable[[], None]) -> Pending:
        if self._thread is not None:
            self._last = self._thread.submit(work)
            return _Queued(self._last, self)
        work()
        return _Done()

    def wait_for(self, future: Future[None]) -> None:
        """Wait until the work is done, whether it failed or not."""
        began = perf_counter_ns()
        while not wait([future], None if self.watch is None else LOOK_EVERY_S).done:
            if self.watch is not None:
                self.watch((perf_counter_ns() - began) / 1e9)

    def mark(self) -> Mark:
        return _Passed()

    def speed(self, work: Callable[[], object]) -> Speed:
        return SpeedProbe(work)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return work  # a call of `work` reads the same memory as a replayed graph would

    def release_graphs(self) -> None:
        pass

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def memory(self) -> Memory:
        """Return the memory by /proc/meminfo; `free` is the memory that is available without swapping."""
        kib = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        return Memory(*(int(kib[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal")))

    def used_bytes(self) -> int:
        return _resident("VmRSS")

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        before = _resident("VmRSS")
        try:
            # on Linux this resets the high-water mark of the process's memory
            _RESET_PEAK.write_text("5", encoding="ascii")
        except OSError:
            work()
            return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, 0)
        work()
        return max(_resident("VmHWM") - before, 0)

    def synchronize(self) -> None:
        if self._last is not None:
            self.wait_for(self._last)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")
