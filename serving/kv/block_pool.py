"""KV blocks with identities: physical ids, reference counts, LRU free queue, and the prefix cache.

The order of the free queue decides what survives, and follows vLLM: blocks are taken from the head, which evicts
their content; a hit takes a block out of the middle; a freed request's blocks go over in reverse, those
without a key to the front, those with one to the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.kv.blocks import Hit, blocks_for
from serving.kv.content import Content
from serving.kv.observed_cache import CacheObserver, ObservedCache
from serving.kv.prefix_cache import PrefixCache
from serving.request import Request
from serving.step_plan import by_admission


class BlockPool:
    """`config.num_blocks` blocks, of which block 0 is the null block and never handed out."""

    counts_only = False

    def __init__(self, config: SchedulerConfig, content: Content) -> None:
        self.block_size = config.block_size
        self.total = config.num_blocks - 1
        self.version = 0
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, config.num_blocks))
        self._references = [0] * config.num_blocks
        self._cache = PrefixCache(content) if config.enable_prefix_caching else None

    @property
    def free(self) -> int:
        return len(self._queue)

    @property
    def caches(self) -> bool:
        """Whether prefixes can be found."""
        return self._cache is not None

    def observe(self, observer: CacheObserver) -> None:
        """Tell `observer` what can be found from now on; nothing can be found yet."""
        if self._cache:
            self._cache = ObservedCache(self._cache, observer)

    def lookup(self, request: Request) -> Hit:
        found = self._find(request)
        return Hit(len(found), sum(not self._references[block] for block in found))

    def admit(self, request: Request, hit: Hit) -> None:
        for block in self._find(request):
            if not self._references[block]:
                del self._queue[block]
            self._references[block] += 1
            request.blocks.append(block)
        request.held = request.hashed = hit.blocks

    def extend(self, request: Request, tokens: int) -> None:
        for _ in range(blocks_for(tokens, self.block_size) - len(request.blocks)):
            block, _ = self._queue.popitem(last=False)
            if self._cache:
                self._cache.evict(block)
            self._references[block] = 1
            request.blocks.append(block)
        request.held = len(request.blocks)

    def register(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        if self._cache and full > request.hashed:
            self._cache.insert(request, request.hashed, full)
            request.hashed = full
            self.version += 1

    def forget(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        if self._cache:
            for block in request.blocks[full : request.hashed]:
                self._cache.evict(block)
        request.hashed = min(request.hashed, full)

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        self.take_for(decodes, 1, lag)

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        for after in range(steps):
            starts, fills = decodes.crossing(after), decodes.crossing(after + 1 - lag)
            for request in _in_order((starts | fills).values()):
                if request.id in starts:
                    self.extend(request, request.computed + after + 1)
                if request.id in fills:
                    self.register(request, request.computed + after + 1 - lag)
        decodes.lag = lag

    def ahead(self, decodes: DecodeSet, steps: int) -> int:
        return decodes.crossings(steps)

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        for request in _in_order(decodes.crossing(after=-lag).values()):
            self.register(request, request.computed - lag)
        decodes.lag = lag

    def release(self, request: Request, may_return: bool = False) -> None:
        for block in reversed(request.blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._queue[block] = None
                if not self._cache or not self._cache.holds(block):
                    self._queue.move_to_end(block, last=False)
        request.blocks.clear()
        request.held = request.hashed = 0
        self.version += 1

    def _find(self, request: Request) -> list[int]:
        if not self._cache:
            return []
        return self._cache.find(request, (request.known - 1) // self.block_size)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless counts equal a recount over the live `requests`."""
        counted = [0] * len(self._references)
        for request in requests:
            assert len(request.blocks) == len(set(request.blocks))
            for block in request.blocks:
                counted[block] += 1
        assert counted == self._references
        assert {b for b in range(1, len(counted)) if not counted[b]} == set(self._queue)
        if self._cache:
            self._cache.check()


def _in_order(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=by_admission)
