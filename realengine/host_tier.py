"""A KV tier in host memory: blocks are copied there when a step has filled them, and back for requests that reuse them.

`HostMemory` belongs to one rank. It has slots for blocks, and makes copies while steps run. `HostTier` is the tier of
the whole engine. The rules in `tokentwin.serving.kv.tiered_blocks`, which the simulator also uses, decide which blocks
are kept there and which are reused. A copy never overlaps with a step that writes to the same block. To that end a
block is copied out after the step that filled it, the blocks of an ended request are kept until they are copied out,
and a step that may reuse other requests' blocks waits for all copies.

In the overlapped loop a step is planned while the tokens of the step before are unknown, and the key of a block is a
function of its tokens. So the keys of the blocks that the later step fills are computed only when the earlier step has
ended, before any request looks for these blocks. A load begins when the step under way has ended, because this step may
still write to freed blocks that the load will fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import torch

from tokentwin.realengine.attention.kv_cache import KvCache
from tokentwin.realengine.step import Attempt, Launched, TierEvents, Transfer
from tokentwin.serving.answers.figures import shown_gib
from tokentwin.serving.contract import Contract
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_tiers import KvTiersConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import Content
from tokentwin.serving.kv.tiered_blocks import Filling, TieredBlocks, tier_blocks
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan


class Copy(Protocol):
    """A copy that is under way."""

    def done(self) -> bool: ...

    def times_ns(self) -> tuple[int, int]:
        """Wait for the end of the copy; return when it began and when it ended, on `perf_counter_ns`."""


class Copies(list[Copy]):
    """Several copies that count as one: it begins with the first and ends with the last."""

    def done(self) -> bool:
        return all(copy.done() for copy in self)

    def times_ns(self) -> tuple[int, int]:
        began_ns, ended_ns = zip(*(copy.times_ns() for copy in self), strict=True)
        return min(began_ns), max(ended_ns)


class _ThreadCopy:
    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self.done, self.times_ns = future.done, future.result


class ThreadCopier:
    """A copier for the CPU, which runs on its own thread. Copies run in the order of submission."""

    pinned = False  # the CPU copies from host memory that is not page-locked, too

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
        """Return when the copy began and when it ended.

        The end is the time at which the host noticed it, between two steps.
        """
        self._ended.synchronize()
        self._seen_ns = self._seen_ns or perf_counter_ns()
        return self._seen_ns - round(self._began.elapsed_time(self._ended) * 1e6), self._seen_ns


class StreamCopier:
    """A copier for CUDA with its own stream and page-locked host memory. Copies run in the order of submission."""

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
    """A rank's KV blocks in host memory: one tensor with `slots` places for copies of blocks of `kv`.

    Raises UserError if the host's memory does not suffice.
    """

    def __init__(self, slots: int, kv: KvCache, device: torch.device) -> None:
        self._kv = kv
        self.copier: StreamCopier | ThreadCopier = StreamCopier(device) if device.type == "cuda" else ThreadCopier()
        try:
            self._blocks = torch.empty((slots, *kv.block_shape), dtype=kv.dtype, pin_memory=self.copier.pinned)
        except RuntimeError:
            self.copier.close()
            rank, remedy = f"{shown_gib(slots * kv.block_bytes)} a rank", "is more than the host has; lower it"
            raise UserError("kv_tiers.tiers.0.capacity_gib", rank, remedy) from None

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Copy each `(block, slot)` of `pairs`: from the slot into the block if `reads`, else into the slot."""
        return self.copier.submit(partial(self._copy, list(pairs), reads))

    def _copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> None:
        for block, slot in pairs:
            inside, outside = self._kv.block(block), self._blocks[slot]
            target, source = (inside, outside) if reads else (outside, inside)
            target.copy_(source, non_blocking=True)


class _UnderWay(NamedTuple):
    copy: Copy
    reads: bool
    size_bytes: int
    submitted_ns: int
    request: Request | None  # request that loads blocks; None for a copy out


BlockCopy = Callable[[Sequence[tuple[int, int]], bool], Copy]  # `ModelRunner.copy`


class HostTier(TieredBlocks):
    """The KV tier of an engine; a block has `block_bytes` bytes on all ranks together.

    `copies` has a function for the target model and one for a draft model; each copies its part of a block. `policy` is
    the scheduler that the tier serves.

    Attributes:
        must_settle: True if blocks were freed that may still be being copied out
    """

    def __init__(
        self,
        copies: Sequence[BlockCopy],
        tiers: KvTiersConfig,
        block_bytes: int,
        config: SchedulerConfig,
        content: Content,
        policy: Contract,
    ) -> None:
        super().__init__(tiers, block_bytes, config, content)
        (self._capacity,) = tier_blocks(tiers, block_bytes)
        self._block_bytes = block_bytes
        self.must_settle = False
        self._copies = copies
        self._policy = policy
        self._slots: dict[bytes, int] = {}  # slot of each block
        self._free = list(range(self._capacity))[::-1]
        self._filled: list[tuple[bytes, int]] = []  # blocks to copy out: keys, and blocks on the device
        self._copy_of: dict[bytes, int] = {}  # number of the copy that writes or wrote each block
        self._submitted = self._ended = 0  # numbers of copies; they end in the order of submission
        self._under_way: deque[_UnderWay] = deque()
        self._in_flight = 0  # steps
        self._filling: Filling | None = None  # blocks of the step planned last, if another was under way
        self._loading: list[tuple[Request, list[int], list[bytes]]] = []  # loads to begin: blocks, and their keys
        self._kept: list[tuple[int, Request]] = []  # ended requests, and the number of the copy that each waits for
        self._events = TierEvents([], [], [], [], [])
        self._loads_noted = 0

    @property
    def busy(self) -> bool:
        """True if copies are under way or about to begin."""
        return bool(self._under_way or self._loading)

    # Calls from the scheduler

    def load(self, request: Request, start: int, tokens: int) -> None:
        keys = self.loaded_keys(request, start, tokens)
        self._loading.append((request, request.blocks[start // self.block_size :], keys))
        if not self._in_flight:
            self._copy()
        self._events.loads.append((request.id, tokens, request.preemptions > 0))
        self._use(keys)

    def admitted(self, request: Request) -> None:
        """Do nothing, because a reused block counts as used only when the request ends."""

    def keeps(self, request: Request) -> bool:
        """Copy out the request's blocks that the tier lacks; return whether it must keep its blocks until then."""
        written = self._store_all(request, 0)
        if not self._in_flight:
            self._copy()
        if written <= self._ended:
            return False
        self._kept.append((written, request))
        return True

    # Calls from the engine

    def poll(self) -> None:
        """Tell the scheduler which copies have ended; the engine calls this before it plans a step."""
        came = []
        while self._under_way and self._under_way[0].copy.done():
            copy, reads, size_bytes, submitted_ns, request = self._under_way.popleft()
            times_ns = copy.times_ns()  # raises the copy's error
            self._ended += 1
            self._events.transfers.append(Transfer(reads, size_bytes, submitted_ns, *times_ns))
            if request is not None:
                came.append(request)
        for request in came:
            self._policy.loaded(request)
            self._events.loaded.append(request.id)
        written, self._kept = self._kept, []
        for number, request in written:
            if number > self._ended:
                self._kept.append((number, request))
                continue
            self._policy.release(request)
            self._events.released.append(request.id)

    def attempted(self, plan_ns: int) -> None:
        """Note that a plan made at `plan_ns` had nothing to run."""
        loaded, released, loads, _, attempts = self._events
        stepped = not attempts or attempts[-1].in_flight > self._in_flight
        if stepped or loaded or released or len(loads) > self._loads_noted:
            attempts.append(Attempt(plan_ns, self._in_flight, list(loaded), list(released)))
            loaded.clear()
            released.clear()
            self._loads_noted = len(loads)

    def before_step(self, plan: StepPlan, under_way: Iterable[Launched]) -> None:
        """Prepare for `plan`, which is about to run after the steps `under_way`.

        Afterwards the blocks that the plan fills are noted for copying out, and no copy of a block that it may write to
        is under way.
        """
        if self.must_settle:
            for launched in under_way:
                launched.wait()
            self._copy()
            self.settle()
            self.must_settle = False
        if self._in_flight:
            self._filling = self.filling(plan)
        else:
            self.planned(plan, 0)
        self._in_flight += 1

    def settle(self) -> None:
        """Wait for all copies, so that a step may write to any block."""
        for one in self._under_way:
            one.copy.times_ns()

    def step_ended(self) -> None:
        """Copy out the blocks that the oldest step has filled; this step has just ended, so its tokens are known."""
        self._in_flight -= 1
        self._copy()
        if self._filling is not None:
            spans = [span for span in self._filling.spans if not span[0].ended]  # aborted requests are left out
            self.fill(self._filling._replace(spans=spans), 0)
            self._filling = None

    def _copy(self) -> None:
        """Submit the copies of filled blocks to the tier, then the loads that wait for them."""
        pairs = []
        for key, block in self._filled:
            if key not in self._slots and self.has(key):
                slot = self._slots[key] = self._free.pop()
                pairs.append((block, slot))
        if self._filled:  # make the copy even if it has no blocks left, because a request may wait for its end
            self._filled.clear()
            self._submit(pairs)
        for request, blocks, keys in self._loading:
            self._submit([(block, self._slots[key]) for block, key in zip(blocks, keys, strict=False)], request)
        self._loading.clear()

    def events(self) -> TierEvents:
        """Return the events since the last call."""
        events, self._events = self._events, TierEvents([], [], [], [], [])
        self._loads_noted = 0
        return events

    def close(self) -> None:
        """Wait for the copies under way, even if they fail."""
        with suppress(Exception):
            self.settle()

    # Transfers

    def _submit(self, pairs: Sequence[tuple[int, int]], request: Request | None = None) -> None:
        self._submitted += 1
        reads, size_bytes, now_ns = request is not None, len(pairs) * self._block_bytes, perf_counter_ns()
        copy = Copies([copy(pairs, reads) for copy in self._copies])
        self._under_way.append(_UnderWay(copy, reads, size_bytes, now_ns, request))

    def _write(self, request: Request, missing: Sequence[tuple[int, bytes]], ready_ns: int) -> None:
        for place, key in missing:
            self._filled.append((key, request.blocks[place]))
            self._copy_of[key] = self._submitted + 1

    def _written(self, keys: Sequence[bytes]) -> int:
        return max((self._copy_of[key] for key in keys), default=0)

    def _moved(self, pushed: dict[bytes, int]) -> None:
        for key in pushed:  # drop their slots, because there is no slower tier
            del self._copy_of[key]
            if key in self._slots:
                self._free.append(self._slots.pop(key))

    def check(self) -> None:
        """Raise AssertionError unless every block has its own slot."""
        self.cache.check()
        places = sorted([*self._slots.values(), *self._free])
        assert places == list(range(self._capacity))
        assert len(self.cache) == len(self._copy_of)
        assert all(self.has(key) for key in (*self._slots, *self._copy_of))
