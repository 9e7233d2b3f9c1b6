"""The current speed of the machine, which other processes, clock rates and heat change.

On the CPU a fixed piece of the engine's own work is timed between steps, on the thread that runs them. On a GPU the
clock rate is read, on a thread of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from threading import Thread
from time import perf_counter_ns, sleep, thread_time_ns
from weakref import ref

import numpy as np

Speed = Callable[[], float | None]  # speed at this moment; None if it is not known

_PIECE = (16, 576, 1536)  # rows, and the shape of weights
_SHARE = 0.02  # share of the time that measurements may take
_GPU_EVERY_S = 0.05
_MOST_READ = 20  # number of values that are kept between two calls


class SpeedProbe:
    """A probe of the CPU's speed: how many times this thread can run `work` in a millisecond of CPU time.

    Measurements take 2 % of the time; between measurements the last result counts.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._began_ns = perf_counter_ns()
        self._spent_ns = self._last_ns = 0
        self._speed: float | None = None

    def __call__(self) -> float | None:
        now = perf_counter_ns()
        if self._spent_ns + self._last_ns <= _SHARE * (now - self._began_ns):
            began = thread_time_ns()
            self._work()
            self._speed = 1e6 / max(thread_time_ns() - began, 1)
            self._last_ns = perf_counter_ns() - now
            self._spent_ns += self._last_ns
        return self._speed


def piece_of_work() -> Callable[[], object]:
    """Return a fixed matrix product, of the size in a small model's layer, to probe the speed under another engine."""
    rows, inner, outer = _PIECE
    left, right = np.ones((rows, inner), np.float32), np.ones((inner, outer), np.float32)
    return lambda: left @ right


class GpuClock:
    """The clock rate of GPU `index` as a fraction of its maximum, read with NVML (nvidia-ml-py); None without NVML.

    A thread of its own reads it, because NVML may take milliseconds. A call never waits: it returns the mean of the
    last 20 values that were read since the call before, or the last value if nothing was.
    """

    def __init__(self, index: int) -> None:
        self._read: deque[float] = deque(maxlen=_MOST_READ)
        self._last: float | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            most = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)

            def read() -> float:
                return float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)) / most

            self._last = read()
        except Exception:  # the package, the library, or the right to read is missing; the engine runs without a speed
            return
        Thread(target=_keep_reading, args=(read, ref(self)), name="nvml", daemon=True).start()

    def __call__(self) -> float | None:
        read, self._read = self._read, deque(maxlen=_MOST_READ)
        if values := list(read):  # a copy, because the other thread may still append
            self._last = fmean(values)
        return self._last

    def note(self, clock: float) -> None:
        """Keep a value that was read; only the reading thread calls this."""
        self._read.append(clock)


def _keep_reading(read: Callable[[], float], clock: ref[GpuClock]) -> None:
    """Read every `_GPU_EVERY_S` seconds until the clock is no longer used, or can no longer be read."""
    while (kept := clock()) is not None:
        try:
            kept.note(read())
        except Exception:  # the GPU is lost; steps find that out by themselves
            return
        del kept
        sleep(_GPU_EVERY_S)
