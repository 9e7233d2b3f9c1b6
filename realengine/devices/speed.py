"""The speed of the machine at the moment, whatever the engine does on it: neighbours, clocks and heat change it.

On the CPU a fixed piece of the engine's own work is timed between steps, on the thread that runs them. On a GPU its
clock is read.
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
    """A probe of how often `work` fits into a millisecond of this thread.

    Measurements take 2 % of the time; between them the last result counts.
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
    """Return a fixed product of matrices, as a layer of a small model has them, for an engine that is not ours."""
    rows, inner, outer = _PIECE
    left, right = np.ones((rows, inner), np.float32), np.ones((inner, outer), np.float32)
    return lambda: left @ right


class GpuClock:
    """The clock of GPU `index` as a share of its highest, by NVML (Python package nvidia-ml-py); None without it."""

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
        except Exception:  # the package, the library, or the right to read is missing: the engine runs without
            return

    def __call__(self) -> float | None:
        now = perf_counter_ns()
        if self._nvml is not None and now - self._looked_ns >= _GPU_EVERY_NS:
            self._looked_ns = now
            self._speed = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM) / self._most
        return self._speed
