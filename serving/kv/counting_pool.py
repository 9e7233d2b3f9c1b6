"""KV blocks as counts, for workloads in which nothing is shared.

The only possible hit is then a preempted request finding its *own* surviving blocks. Its freed blocks sit in the
queue as one run, last block first, so eviction shortens the run from the far end and what survives is a
prefix. The queue is a deque of such runs between anonymous counts, and every operation is O(1) amortised.
"""

from __future__ import annotations

from collections import deque

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.kv.blocks import NO_HIT, Hit, blocks_for
from serving.request import Request


class _Run:
    """`count` free blocks in a row: blocks `first` .. `first + count - 1` of `owner`, the last one foremost."""

    __slots__ = ("count", "first", "owner")

    def __init__(self, owner: int | None, first: int, count: int) -> None:
        self.owner = owner
        self.first = first
        self.count = count


class CountingPool:
    """`config.num_blocks - 1` blocks without identities."""

    counts_only = True

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.total = config.num_blocks - 1
        self.free = self.total
        self.version = 0
        self._caching = config.enable_prefix_caching
        self._queue: deque[_Run] = deque([_Run(None, 0, self.total)])
        self._own: dict[int, list[_Run]] = {}  # preempted request -> its runs, oldest first

    def lookup(self, request: Request) -> Hit:
        found = len(self._find(request))
        return Hit(found, found) if found else NO_HIT

    def admit(self, request: Request, hit: Hit) -> None:
        if hit.idle:
            for block, run in enumerate(self._find(request)):
                self._take_out(run, block)
            self.free -= hit.idle
        request.held = request.hashed = hit.blocks

    def extend(self, request: Request, tokens: int) -> None:
        need = blocks_for(tokens, self.block_size) - request.held
        if need > 0:
            self._take(need)
            request.held += need

    def register(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        if full > request.hashed:
            request.hashed = full

    def forget(self, request: Request, tokens: int) -> None:
        request.hashed = min(request.hashed, tokens // self.block_size)

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        self._take(len(decodes.crossing()))
        decodes.lag = lag

    def ahead(self, decodes: DecodeSet, steps: int) -> int:
        return decodes.crossings(steps)

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        decodes.lag = lag

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        self._take(decodes.crossings(steps))
        decodes.lag = lag

    def release(self, request: Request, may_return: bool = False) -> None:
        hashed = request.hashed if self._caching else 0
        self.free += request.held
        self.version += 1
        self._put_first(request.held - hashed)
        if not may_return:
            self._own.pop(request.id, None)
            self._put_last(hashed)
        elif hashed:
            run = _Run(request.id, 0, hashed)
            self._queue.append(run)
            self._own[request.id] = [r for r in self._own.get(request.id, ()) if r.count] + [run]
        request.held = request.hashed = 0

    def _find(self, request: Request) -> list[_Run]:
        """The run that holds each surviving leading block; among several, the one registered first."""
        runs = self._own.get(request.id)
        found: list[_Run] = []
        while runs and len(found) < (request.known - 1) // self.block_size:
            block = len(found)
            run = next((r for r in runs if r.first <= block < r.first + r.count), None)
            if run is None:
                break
            found.append(run)
        return found

    def _take(self, count: int) -> None:
        self.free -= count
        head = self._queue[0]
        if count < head.count:  # nearly always
            head.count -= count
            return
        if self.free < 0:
            raise ValueError(f"{-self.free} KV blocks were taken beyond those there are")
        while count:
            head = self._queue[0]
            taken = min(count, head.count)
            head.count -= taken
            count -= taken
            if not head.count and len(self._queue) > 1:
                self._queue.popleft()

    def _take_out(self, run: _Run, block: int) -> None:
        """Remove one block of a run, which may split it (its blocks stand last block first)."""
        above = run.first + run.count - block - 1
        if above and block > run.first:
            front = _Run(run.owner, block + 1, above)
            self._queue.insert(self._queue.index(run), front)
            assert run.owner is not None
            runs = self._own[run.owner]
            runs.insert(runs.index(run), front)
            run.count -= above + 1
        elif block == run.first:
            run.first += 1
            run.count -= 1
        else:
            run.count -= 1

    def _put_first(self, count: int) -> None:
        if self._queue and self._queue[0].owner is None:
            self._queue[0].count += count
        elif count:
            self._queue.appendleft(_Run(None, 0, count))

    def _put_last(self, count: int) -> None:
        if self._queue and self._queue[-1].owner is None:
            self._queue[-1].count += count
        elif count:
            self._queue.append(_Run(None, 0, count))
