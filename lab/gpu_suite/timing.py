"""The time of one call on the device, without the host's work, and with inputs that are not in the GPU's cache.

On a GPU, calls are captured in a CUDA graph, each with the next of several input sets, and the graph's replays are
timed by events. On a CPU the same interface makes plain calls, so that a dry run takes the same path; its figures mean
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

Inputs = TypeVar("Inputs")

# maximum number of input sets; inputs so small that 128 sets fit the cache are cached in the engine, too
_MAX_SETS = 128
_GRAPH_NS = 2_000_000  # ns of work in a graph, long enough to make the gap between two replays negligible
_MAX_CALLS = 256  # calls in a graph
_MEASURING_NS = 60_000_000  # ns of timed replays after the warm-up
_FEWEST, _MOST = 5, 15  # minimum and maximum number of repeats


class Timing(NamedTuple):
    """The times of one call.

    Attributes:
        median_ns: median time of one call
        spread_pct: distance between the quartiles, in % of the median; two timings that differ by less are equal within
            noise
        repeats: number of timings, each of at least one call
    """

    median_ns: float
    spread_pct: float
    repeats: int

    @classmethod
    def from_times(cls, times_ns: list[float]) -> Timing:
        """Summarise at least two times of one call."""
        middle = median(times_ns)
        first, _, third = quantiles(times_ns, n=4, method="inclusive")
        return cls(middle, 100 * (third - first) / middle if middle else 0.0, len(times_ns))


class Bench(Protocol):
    """A timer of calls on `device`."""

    device: torch.device

    def time(self, make_inputs: Callable[[int], Inputs], call: Callable[[Inputs], object], input_bytes: int) -> Timing:
        """Time one `call`, cycling through sets of inputs of `input_bytes` each; `make_inputs(i)` makes set i."""

    def time_eagerly(self, call: Callable[[], object], calls: int) -> Timing:
        """Return the time of one call, from `calls` calls in a row, each launched by the host."""


def find_bench(device: str) -> Bench:
    """Return the bench for "cuda" or "cpu"."""
    return CudaBench() if device == "cuda" else CpuBench()


class CudaBench:
    """The bench of the current GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cache_bytes = int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def time(self, make_inputs: Callable[[int], Inputs], call: Callable[[Inputs], object], input_bytes: int) -> Timing:
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        sets = [make_inputs(index) for index in range(input_sets(input_bytes, self._cache_bytes, free))]
        for _ in range(2):  # the first call compiles
            call(sets[0])
        once_ns = _between_events(lambda: call(sets[-1]))
        calls = max(len(sets), min(_MAX_CALLS, round(_GRAPH_NS / max(once_ns, 1.0))), 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(calls):
                call(sets[index % len(sets)])
        graph.replay()
        replay_ns = _between_events(graph.replay)
        repeats = max(_FEWEST, min(_MOST, round(_MEASURING_NS / max(replay_ns, 1.0))))
        times = _apart([graph.replay] * repeats)
        graph.reset()
        return Timing.from_times([time / calls for time in times])

    def time_eagerly(self, call: Callable[[], object], calls: int) -> Timing:
        def launch() -> None:
            for _ in range(calls):
                call()

        launch()
        return Timing.from_times([time / calls for time in _apart([launch] * _FEWEST)])


class CpuBench:
    """The bench of a CPU: two plain calls."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def time(self, make_inputs: Callable[[int], Inputs], call: Callable[[Inputs], object], input_bytes: int) -> Timing:
        sets = [make_inputs(index) for index in range(2)]
        return Timing.from_times([_on_host(lambda inputs=inputs: call(inputs)) for inputs in sets])  # type: ignore[misc]

    def time_eagerly(self, call: Callable[[], object], calls: int) -> Timing:
        def launch() -> None:
            for _ in range(calls):
                call()

        return Timing.from_times([_on_host(launch) / calls for _ in range(2)])


def input_sets(input_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """Return the number of input sets to cycle through: twice the cache, in half of the free memory, at least one."""
    wanted = -(-2 * cache_bytes // max(input_bytes, 1))
    return max(1, min(wanted, _MAX_SETS, free_bytes // (2 * max(input_bytes, 1))))


def _on_host(work: Callable[[], object]) -> float:
    start = perf_counter_ns()
    work()
    return float(perf_counter_ns() - start)


def _between_events(work: Callable[[], object]) -> float:
    return _apart([work])[0]


def _apart(works: list[Callable[[], Any]]) -> list[float]:
    """Return the device time in ns of each of `works`, which are enqueued one after the other without waiting."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    marks[0].record()
    for work, mark in zip(works, marks[1:], strict=True):
        work()
        mark.record()
    torch.cuda.synchronize()
    return [1e6 * before.elapsed_time(after) for before, after in pairwise(marks)]
