"""KV blocks of models with sliding windows: a block table for each group of layers, all from one pool.

Follows vLLM 0.33's hybrid allocator. Groups have equally many layers, so that a block of one is as large as a block of
another. A block that lies wholly before the window of every query to come is freed while its request runs, and the null
block takes its place in the table; queries of steps in flight count as queries to come.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.deployments.kv_groups import most_sliding_tokens
from serving.errors import UserError
from serving.kv.blocks import NO_HIT, CacheObserver, Hit, KvBlocks, blocks_for
from serving.kv.content import Content, block_keys
from serving.kv.prefix_cache import PrefixCache
from serving.request import Request
from serving.step_plan import by_admission

_NULL = 0


class GroupedPool:
    """`config.kv_groups` says which groups there are. A request's `held` and `hashed` count entries of each table.

    groups  how many there are

    `Request.blocks` is the table of the first group with full attention, or of the first group if there is none.
    """

    counts_only = defers = False

    def __init__(self, config: SchedulerConfig, content: Content) -> None:
        self.block_size = config.block_size
        self.total = config.num_blocks - 1
        self.version = 0
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, config.num_blocks))
        self._references = [0] * config.num_blocks
        windows = config.kv_groups
        self.groups = len(windows)
        self._sliding = [group for group, window in enumerate(windows) if window]
        self._full = [group for group, window in enumerate(windows) if not window]
        self._shown = self._full[0] if self._full else 0
        self._content = content
        self._caches: list[PrefixCache] = []
        if config.enable_prefix_caching:
            self._caches = [PrefixCache(content) for _ in windows]
        self._past = max(windows) - 1  # tokens before its own that a query sees
        self._tail = blocks_for(self._past, self.block_size)  # blocks at the end of a hit that must be there
        interval = config.prefix_cache_retention_interval
        self._segment = 1 if interval is None else interval // self.block_size
        self._most_sliding_tokens = most_sliding_tokens(config)
        self._tables: dict[int, list[list[int]]] = {}
        self._slid: dict[int, int] = {}  # leading entries of sliding tables that are null
        self._junction: dict[int, int] = {}  # where full attention's cached prefix ends, if the hit ends before
        self._unsettled: dict[int, Request] = {}  # what was extended by itself, and may have prefill in flight

    @property
    def free(self) -> int:
        return len(self._queue)

    @property
    def caches(self) -> bool:
        """Whether prefixes can be found."""
        return bool(self._caches)

    def settled(self, request: Request) -> bool:
        return True

    def observe(self, observer: CacheObserver) -> None:
        """Tell `observer` of the first group with full attention. Raises UserError if there is none."""
        if not self._full:
            raise UserError("kv-events", "on", "tells of full attention; every layer of this model has a window")
        if self._caches:
            self._caches[self._shown].observer = observer

    def tables(self, request: Request) -> list[list[int]]:
        """Block ids of `request` by group, 0 where the window has passed."""
        return self._tables[request.id]

    # How many blocks

    def to_admit(self, tokens: int, hit: Hit, now: int) -> int:
        """Free blocks that a waiting request needs for its first `tokens` tokens beside those of `hit`.

        The next step computes those up to `now`; of the rest, sliding layers never hold more than they see at once.
        """
        return max(self._beside(hit, now, now), self._beside(hit, tokens, min(tokens, self._most_sliding_tokens)))

    def _beside(self, hit: Hit, full: int, sliding: int) -> int:
        more = [max(blocks_for(tokens, self.block_size) - hit.blocks, 0) for tokens in (full, sliding)]
        return len(self._full) * more[0] + len(self._sliding) * more[1] + hit.idle

    def lacking(self, request: Request, tokens: int) -> int:
        """Blocks that `extend` would take, without those that it would free."""
        return self.groups * (blocks_for(tokens, self.block_size) - request.held) - self._leaving(request)

    def ahead(self, decodes: DecodeSet, steps: int) -> int:
        left: Counter[int] = Counter()
        passed = 0  # blocks that these ticks both take and leave behind
        for member in decodes.members.values():
            first, last = self._slid[member.id], self._before_window(member, after=steps - 1)
            for group in self._sliding:
                left.update(self._tables[member.id][group][first:last])
                passed += max(last - member.held, 0)
        freed = sum(self._references[block] == times for block, times in left.items())
        return self.groups * decodes.crossings(steps) - freed - passed

    def _leaving(self, request: Request) -> int:
        """Blocks that are the request's alone, and that no query to come can see."""
        first, last = self._slid[request.id], self._before_window(request)
        if last <= first:
            return 0
        tables = self._tables[request.id]
        return sum(self._references[block] == 1 for group in self._sliding for block in tables[group][first:last])

    def _before_window(self, request: Request, after: int = 0) -> int:
        """Leading entries of a sliding table that no query sees from the tick on that is `after` the next."""
        return max(request.computed + after - request.in_flight - self._past, 0) // self.block_size

    # Lookup and admission

    def lookup(self, request: Request) -> Hit:
        if not self._caches:
            return NO_HIT
        keys = self._keys(request)
        longest = found = self._full_run(keys) if self._full else len(keys)
        if self._sliding:
            found = self._end_of_tail(keys, found)
        self._junction[request.id] = longest if self._full and longest > found else 0
        tables = self._found(keys, found)
        return Hit(found, sum(not self._references[block] for table in tables for block in table if block != _NULL))

    def _keys(self, request: Request) -> list[bytes]:
        most = (request.known - 1) // self.block_size
        return block_keys(request, most, self._content)[:most]

    def _full_run(self, keys: list[bytes]) -> int:
        """How many of the leading `keys` every group with full attention has."""
        caches = [self._caches[group] for group in self._full]
        for index, key in enumerate(keys):
            if not all(cache.first(key) for cache in caches):
                return index
        return len(keys)

    def _end_of_tail(self, keys: list[bytes], most: int) -> int:
        """The longest hit of sliding layers: its last `_tail` blocks, or all if it is shorter, are there."""
        caches = [self._caches[group] for group in self._sliding]
        run = 0
        for index in range(most - 1, -1, -1):
            run = run + 1 if all(cache.first(keys[index]) for cache in caches) else 0
            if run == self._tail:
                return index + run
        return run

    def _found(self, keys: list[bytes], count: int) -> list[list[int]]:
        """The blocks of a hit, by group; null where the window of the next query has passed."""
        slid = max(count * self.block_size - self._past, 0) // self.block_size
        tables = []
        for group, cache in enumerate(self._caches):
            first = slid if group in self._sliding else 0
            tables.append([_NULL] * first + [cache.first(key) for key in keys[first:count]])
        return tables

    def admit(self, request: Request, hit: Hit) -> None:
        tables = self._found(self._keys(request), hit.blocks) if hit.blocks else [[] for _ in range(self.groups)]
        for table in tables:
            for block in table:
                if block != _NULL:
                    if not self._references[block]:
                        del self._queue[block]
                    self._references[block] += 1
        self._tables[request.id] = tables
        self._slid[request.id] = max(hit.blocks * self.block_size - self._past, 0) // self.block_size
        request.blocks = tables[self._shown]
        request.held = request.hashed = hit.blocks

    # While it runs

    def slide(self, request: Request, after: int = 0) -> None:
        """Free what lies before the window, the last block first."""
        first, last = self._slid[request.id], min(self._before_window(request, after), request.held)
        if last <= first:
            return
        for group in self._sliding:
            table = self._tables[request.id][group]
            self._free(reversed(table[first:last]))
            table[first:last] = [_NULL] * (last - first)
        self._slid[request.id] = last
        self.version += 1

    def extend(self, request: Request, tokens: int) -> None:
        self._unsettled[request.id] = request
        self.slide(request)
        self._take(request, tokens)

    def _take(self, request: Request, tokens: int) -> None:
        need = blocks_for(tokens, self.block_size) - request.held
        if need <= 0:
            return
        for table in self._tables[request.id]:
            for _ in range(need):
                block, _ = self._queue.popitem(last=False)
                self._evict(block)
                self._references[block] = 1
                table.append(block)
        request.held += need
        self.version += 1  # a hit that has lost its end may need fewer blocks

    def register(self, request: Request, tokens: int) -> None:
        first, full = request.hashed, tokens // self.block_size
        if not self._caches or full <= first:
            return
        for group, (cache, table) in enumerate(zip(self._caches, self._tables[request.id], strict=True)):
            if group == self._shown and self._full:
                cache.insert(request, first, full)
            else:
                kept = range(first, full) if group in self._full else self._kept(request, first, full)
                for index in kept:
                    cache.put(block_keys(request, index + 1, self._content)[index], table[index])
        request.hashed = full
        self.version += 1

    def _kept(self, request: Request, first: int, last: int) -> Iterable[int]:
        """Which blocks from `first` to `last` of a sliding table can be found, by `prefix_cache_retention_interval`.

        Always those at the end of its prompt, and of a prefix that full attention had in common with others.
        """
        segment, tail = self._segment, self._tail
        if 0 < segment <= tail:
            return range(first, last)
        ends = ((request.prompt_len - 1) // self.block_size, self._junction.get(request.id, 0))
        return [
            index
            for index in range(first, last)
            if (segment and index % segment >= segment - tail) or any(end - tail <= index < end for end in ends)
        ]

    def forget(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        for table in self._tables[request.id]:
            for block in table[full : request.hashed]:
                self._evict(block)
        request.hashed = min(request.hashed, full)

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        for after in range(steps):
            starts, fills = decodes.crossing(after), decodes.crossing(after + 1 - lag)
            slides = decodes.crossing(after - lag - self._past)
            if not lag:  # the tick before may have been planned behind one more
                slides = slides | decodes.crossing(after - 1 - self._past)
            for request in sorted((starts | fills | slides | self._settle(decodes, lag)).values(), key=by_admission):
                self.slide(request, after)
                if request.id in starts:
                    self._take(request, request.computed + after + 1)
                if request.id in fills:
                    self.register(request, request.computed + after + 1 - lag)
        decodes.lag = lag

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        self.take_for(decodes, 1, lag)

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        for request in sorted(decodes.crossing(after=-lag).values(), key=by_admission):
            self.register(request, request.computed - lag)
        decodes.lag = lag

    def _settle(self, decodes: DecodeSet, lag: int) -> dict[int, Request]:
        """Members whose window may have moved further than a tick moves it."""
        members = {id: request for id, request in self._unsettled.items() if id in decodes.members}
        for id, request in members.items():
            if request.in_flight <= lag:
                del self._unsettled[id]
        return members

    def release(self, request: Request, may_return: bool = False) -> None:
        for table in self._tables.pop(request.id, ()):
            self._free(block for block in reversed(table) if block != _NULL)
        for state in (self._slid, self._junction, self._unsettled):
            state.pop(request.id, None)
        request.blocks = []
        request.held = request.hashed = 0
        self.version += 1

    def _free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each; with none left, what can be found is evicted last, in this order."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._queue[block] = None
                if not any(cache.holds(block) for cache in self._caches):
                    self._queue.move_to_end(block, last=False)

    def _evict(self, block: int) -> None:
        for cache in self._caches:
            cache.evict(block)

    def check(self, requests: Iterable[Request]) -> None:
        counted = [0] * len(self._references)
        for request in requests:
            for group, table in enumerate(self._tables.get(request.id, ())):
                slid = self._slid[request.id] if group in self._sliding else 0
                assert len(table) == request.held
                assert not any(table[:slid])
                assert all(table[slid:])
                for block in table[slid:]:
                    counted[block] += 1
        assert counted == self._references
        assert {b for b in range(1, len(counted)) if not counted[b]} == set(self._queue)
        for cache in self._caches:
            cache.check()


def block_tables(pool: KvBlocks) -> Callable[[Request], Sequence[Sequence[int]]]:
    """What gives the block tables of a request that runs: one for each group of layers."""
    return pool.tables if isinstance(pool, GroupedPool) else lambda request: (request.blocks,)
