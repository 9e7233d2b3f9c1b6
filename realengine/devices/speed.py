"""The current speed of the machine, which other processes, clock rates and heat change.

On the CPU a fixed piece of the engine's own work is timed between steps, on the thread that runs them. On a GPU the
clock rate is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np

Speed = Callable[[], float | None]  # speed at this moment; None if it is not known

_PIECE = (16, 576, 1536)  # rows, and the shape of weights
_SHARE = 0.02  # share of the time that measurements may take
_GPU_EVERY_NS = 50_000_000


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
    """The clock rate of GPU `index` as a fraction of its maximum, read with NVML (nvidia-ml-py); None without NVML."""

    def __init__(self, index: int) -> None:
        self._nvml: Any = None
        self._looked_ns = 0
        self._speed: float | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._most = pynvml.nvmlDeviceGetMaxClockInfo(self._gpu, pynvml.NVML_CLOCK_SM)
            self._nvml = pynvml
        except Exception:  # the package, the library, or the right to read is missing; the engine runs without a speed
            return

    def __call__(self) -> float | None:
        now = perf_counter_ns()
        if self._nvml is not None and now - self._looked_ns >= _GPU_EVERY_NS:
            self._looked_ns = now
            self._speed = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM) / self._most
        return self._speed
