"""Copies between a device's memory and the host's that run beside its steps, one after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter_ns
from typing import Protocol

import torch


class Copy(Protocol):
    """A copy on its way: whether it has ended, and then when it began and ended on `perf_counter_ns`."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...
    @property
    def began_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...


class Copier(Protocol):
    """Runs copies in the order in which they are submitted. `pinned`: whether host memory is to be page-locked."""

    pinned: bool

    def submit(self, work: Callable[[], object]) -> Copy: ...
    def close(self) -> None: ...


class _ThreadCopy:
    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    @property
    def began_ns(self) -> int:
        return self._future.result()[0]

    @property
    def ended_ns(self) -> int:
        return self._future.result()[1]


class ThreadCopier:
    """On a thread of its own: the CPU's."""

    pinned = False

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copies")

    def submit(self, work: Callable[[], object]) -> Copy:
        return _ThreadCopy(self._thread.submit(_timed, work))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _timed(work: Callable[[], object]) -> tuple[int, int]:
    began_ns = perf_counter_ns()
    with torch.inference_mode():
        work()
    return began_ns, perf_counter_ns()


class _StreamCopy:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended
        self._seen_ns: int | None = None

    def done(self) -> bool:
        return self._seen_ns is not None or (self._ended.query() and self._see())

    def _see(self) -> bool:
        self._seen_ns = perf_counter_ns()
        return True

    def wait(self) -> None:
        self._ended.synchronize()
        if self._seen_ns is None:
            self._see()

    @property
    def began_ns(self) -> int:
        return self.ended_ns - round(self._began.elapsed_time(self._ended) * 1e6)

    @property
    def ended_ns(self) -> int:
        """When it was seen to have ended, which is between two steps."""
        self.wait()
        assert self._seen_ns is not None
        return self._seen_ns


class StreamCopier:
    """On a CUDA stream of its own, from and to pinned memory."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], object]) -> Copy:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            began.record()
            work()
            ended.record()
        return _StreamCopy(began, ended)

    def close(self) -> None:
        self._stream.synchronize()
