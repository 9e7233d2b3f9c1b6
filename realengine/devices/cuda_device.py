"""A CUDA GPU as a device: work is enqueued on one stream, graphs are CUDA graphs, marks are events.

Torch keeps a current stream for each thread. Work may be submitted from any thread, so the stream is named explicitly
wherever it matters. Times of events are converted to the host's clock, so that one step log shows CPU and GPU times
side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any
from weakref import WeakSet

import torch

from tokentwin.realengine.devices.device import LOOK_EVERY_S, Mark, Memory, Pending
from tokentwin.realengine.devices.speed import GpuClock, Speed

# elapsed times are float32, which resolve 0.1 µs only up to a second, so the anchor moves every second
_REANCHOR_MS = 1000.0


class EventClock:
    """A converter of event times to `perf_counter_ns`.

    Times count from an anchor event whose host time is known. The two clocks drift apart, so every second a later event
    becomes the anchor. Its host time is corrected with the waits since the last anchor: the host never sees an event
    before it happened, and the shortest delay with which it saw one after a real wait counts as no delay.
    """

    def __init__(self, anchor: Any, anchor_ns: int) -> None:
        self._anchor = anchor
        self._anchor_ns = anchor_ns
        self._last = anchor
        self._least_delay: int | None = None

    def ns(self, event: Any) -> int:
        """Return the time of `event` in ns, which must be later than the last event that was seen."""
        return self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)

    def seen(self, event: Any, host_ns: int, waited: bool) -> None:
        """Note that the host saw at `host_ns` that `event` had happened; `waited` is True if it was blocked until then.

        It is called once for each step, in order. The anchor can move to the event of the step before.
        """
        if self._anchor.elapsed_time(self._last) > _REANCHOR_MS:
            self._anchor_ns = self.ns(self._last) + (self._least_delay or 0)
            self._anchor = self._last
            self._least_delay = None
        delay = host_ns - self.ns(event)
        if (waited or delay < 0) and (self._least_delay is None or delay < self._least_delay):
            self._least_delay = delay
        self._last = event


class _EventMark:
    __slots__ = ("_clock", "_event")
    thread_ns: int | None = None

    def __init__(self, event: Any, clock: EventClock) -> None:
        self._event, self._clock = event, clock

    def ns(self) -> int:
        return self._clock.ns(self._event)


class _Enqueued:
    def __init__(self, event: Any, clock: EventClock, device: CudaDevice) -> None:
        self._event, self._clock, self._device = event, clock, device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        waited = not self._event.query()
        self._device.wait_for(self._event)
        self._clock.seen(self._event, perf_counter_ns(), waited)


class CudaDevice:
    """The CUDA GPU number `index` of this machine."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self.asynchronous = True
        self.multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.watch: Callable[[float], None] | None = None
        self._stream = torch.cuda.Stream(self.torch_device)
        self._graphs: WeakSet[Any] = WeakSet()
        anchor = self._event()
        anchor.synchronize()
        self._clock = EventClock(anchor, perf_counter_ns())

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def current(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return stream

    def submit(self, work: Callable[[], None]) -> Pending:
        with self.current():
            work()
        return _Enqueued(self._event(), self._clock, self)

    def wait_for(self, event: Any) -> None:
        """Wait until `event` has happened."""
        if self.watch is None:
            event.synchronize()
            return
        began = looked = perf_counter_ns()
        while not event.query():  # the loop spins, as `synchronize` does
            now = perf_counter_ns()
            if now - looked > LOOK_EVERY_S * 1e9:
                looked = now
                self.watch((now - began) / 1e9)

    def mark(self) -> Mark:
        return _EventMark(self._event(), self._clock)

    def speed(self, work: Callable[[], object]) -> Speed:
        return GpuClock(self.torch_device.index)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with self.current():
            for _ in range(2):  # first runs compile kernels and choose algorithms, which a capture does not allow
                work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        sharing = next(iter(self._graphs), None)  # any graph: all graphs share one memory pool
        with torch.cuda.graph(graph, pool=sharing.pool() if sharing else None, stream=self._stream):
            out = work()
        self._graphs.add(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def release_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.reset()
        self._graphs.clear()

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def memory(self) -> Memory:
        torch.cuda.empty_cache()
        return Memory(*torch.cuda.mem_get_info(self.torch_device))

    def used_bytes(self) -> int:
        free, total = self.memory()
        return total - free

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device) - before

    def synchronize(self) -> None:
        self.wait_for(self._event())

    def close(self) -> None:
        self.release_graphs()
