"""Copies between a device's memory and the host's that run beside its steps, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter_ns
from typing import Protocol

import torch

from realengine.kv_cache import KvCache
from serving.errors import UserError
from serving.figures import shown_gib


class Copy(Protocol):
    """A copy that is under way."""

    def done(self) -> bool: ...

    def times_ns(self) -> tuple[int, int]:
        """Return when it began and ended on `perf_counter_ns`; waits for its end."""


class Copies(list[Copy]):
    """Several copies as one, from the first begin to the last end."""

    def done(self) -> bool:
        return all(copy.done() for copy in self)

    def times_ns(self) -> tuple[int, int]:
        began_ns, ended_ns = zip(*(copy.times_ns() for copy in self), strict=True)
        return min(began_ns), max(ended_ns)


class Copier(Protocol):
    """A worker that runs copies in the order of submission.

    Attributes:
        pinned: whether host memory is to be page-locked
    """

    pinned: bool

    def submit(self, work: Callable[[], object]) -> Copy: ...
    def close(self) -> None: ...


class _ThreadCopy:
    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self.done, self.times_ns = future.done, future.result


class ThreadCopier:
    """The CPU's copier, on its own thread."""

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
        if self._seen_ns is None and self._ended.query():
            self._seen_ns = perf_counter_ns()
        return self._seen_ns is not None

    def times_ns(self) -> tuple[int, int]:
        """Return begin and end.

        The end is the time at which the host saw it, which is between two steps.
        """
        self._ended.synchronize()
        self._seen_ns = self._seen_ns or perf_counter_ns()
        return self._seen_ns - round(self._began.elapsed_time(self._ended) * 1e6), self._seen_ns


class StreamCopier:
    """A copier on its own CUDA stream, from and to pinned memory."""

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


class HostMemory:
    """A rank's KV blocks in host memory: `slots` beside the blocks of `kv`, in one tensor.

    Raises UserError if there is no room for it.
    """

    def __init__(self, slots: int, kv: KvCache, device: torch.device) -> None:
        self._kv = kv
        self.copier: Copier = StreamCopier(device) if device.type == "cuda" else ThreadCopier()
        try:
            self._blocks = torch.empty((slots, *kv.block_shape), dtype=kv.dtype, pin_memory=self.copier.pinned)
        except RuntimeError:
            self.copier.close()
            rank, remedy = f"{shown_gib(slots * kv.block_bytes)} a rank", "is more than the host has; lower it"
            raise UserError("kv_tiers.tiers.0.capacity_gib", rank, remedy) from None

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Copy pairs of blocks and slots: from the slots into the blocks if `reads`, else the other way."""
        return self.copier.submit(partial(self._copy, list(pairs), reads))

    def _copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> None:
        for block, slot in pairs:
            inside, outside = self._kv.block(block), self._blocks[slot]
            target, source = (inside, outside) if reads else (outside, inside)
            target.copy_(source, non_blocking=True)
