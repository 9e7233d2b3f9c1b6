"""KV blocks of models with sliding windows: each group of layers has a block table, and all share one pool.

The pool follows vLLM 0.33's hybrid allocator. Groups have equal numbers of layers, so blocks of all groups have equal
sizes. A block that is completely before the window of every future query is freed while its request runs, and the null
block replaces it in the table. Queries of steps in flight count as future queries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_layout import most_sliding_tokens
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.block_pool import BlockPool
from tokentwin.serving.kv.block_runs import BlockTable, Run
from tokentwin.serving.kv.blocks import NO_HIT, CacheObserver, Hit, KvBlocks, blocks_for
from tokentwin.serving.kv.content import Content
from tokentwin.serving.kv.prefix_tree import PrefixTree
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import by_admission

_NULL = 0

Matches = list[tuple[Run, int]]  # (run, end of the blocks of the run that match)


class GroupedPool(BlockPool):
    """A pool for the groups in `config.kv_groups`. A request's `held` and `hashed` count the entries of one table.

    Attributes:
        groups: number of groups
    """

    def __init__(self, config: SchedulerConfig, content: Content, windows: tuple[int, ...] = ()) -> None:
        super().__init__(config, content, named=True)
        windows = windows or config.kv_groups
        self.groups = len(windows)
        self._trees = [PrefixTree(config.block_size, content, group) for group in range(self.groups)]
        self._sliding = [group for group, window in enumerate(windows) if window]
        self._full = [group for group, window in enumerate(windows) if not window]
        self._shown = self._full[0] if self._full else 0  # the group that uses the request itself as its table
        self._tree = self._trees[self._shown]
        self._past = max(windows) - 1  # number of tokens before its own that a query sees
        self._tail = blocks_for(self._past, self.block_size)  # number of last blocks of a hit that must be cached
        interval = config.prefix_cache_retention_interval
        self._segment = 1 if interval is None else interval // self.block_size
        self._most_sliding_tokens = most_sliding_tokens(config) if config.kv_groups else 0
        self._tables: dict[int, list[BlockTable]] = {}
        self._slid: dict[int, int] = {}  # number of leading null entries of sliding tables, by request id
        # by request id, end of the prefix that is cached for full attention, if the hit is shorter
        self._junction: dict[int, int] = {}
        self._unsettled: dict[int, Request] = {}  # requests that ran outside the decode set

    def observe(self, observer: CacheObserver) -> None:
        """Tell `observer` about blocks of the first group with full attention. Raises UserError if there is none."""
        if not self._full:
            raise UserError("kv-events", "on", "tells of full attention; every layer of this model has a window")
        super().observe(observer)

    def tables(self, request: Request) -> list[list[int]]:
        """Return the block ids of `request` in each group; blocks before the window have id 0."""
        return [table.blocks for table in self._tables[request.id]]

    # Numbers of blocks

    def to_admit(self, request: Request, tokens: int, hit: Hit, now: int) -> int:
        """Return how many free blocks the waiting `request` needs for its first `tokens` tokens, beyond those of `hit`.

        Idle blocks of `hit` count as needed. The next step computes the tokens up to `now`, and all layers need blocks
        for these. Later tokens need blocks in sliding layers only up to the maximum that such a layer holds at once,
        because it frees the blocks before its window.
        """
        sliding = min(tokens, self._most_sliding_tokens)
        return max(self._beside_hit(hit, now, now), self._beside_hit(hit, tokens, sliding))

    def _beside_hit(self, hit: Hit, full: int, sliding: int) -> int:
        more = [max(blocks_for(tokens, self.block_size) - hit.blocks, 0) for tokens in (full, sliding)]
        return len(self._full) * more[0] + len(self._sliding) * more[1] + hit.idle

    def lacking(self, request: Request, tokens: int) -> int:
        """Return the number of blocks that `extend` would take, minus the number that it would free."""
        more = self.groups * (blocks_for(tokens, self.block_size) - request.block_count)
        return more - self._leaving([(request, self._before_window(request))])

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        ends = [(member, self._before_window(member, after=steps - 1)) for member in decodes.members.values()]
        # `block_starts` also counts blocks that are both taken and freed within these ticks; `passed` is their number.
        passed = len(self._sliding) * sum(max(last - member.block_count, 0) for member, last in ends)
        return self.groups * decodes.block_starts(steps) - self._leaving(ends) - passed

    def net_blocks_by_tick(self, decodes: DecodeSet, steps: int) -> list[int]:
        ends = {member: self._before_window(member, after=steps - 1) for member in decodes.members.values()}
        if any(run.references > 1 for member, last in ends.items() for run in self._runs_before(last, member)):
            totals = [0, *(self.net_blocks(decodes, ticks) for ticks in range(1, steps + 1))]
            return [total - before for before, total in pairwise(totals)]
        by_tick = [self.groups * len(decodes.at_block_start(tick)) for tick in range(steps)]
        for member, last in ends.items():
            passed = self._before_window(member)
            by_tick[0] -= len(self._sliding) * (passed - self._slid[member.id])
            seen = member.computed - member.in_flight - self._past
            for block in range(passed + 1, last + 1):
                by_tick[block * self.block_size - seen] -= len(self._sliding)
        return by_tick

    def _runs_before(self, last: int, request: Request) -> list[Run]:
        """Return the runs of the request's sliding tables that begin before block `last`."""
        tables = self._tables[request.id]
        return [run for group in self._sliding for run in tables[group].held_runs() if run.first < last]

    def _leaving(self, ends: Iterable[tuple[Request, int]]) -> int:
        """Return how many blocks become free if each request in `ends` gives up its sliding blocks before a block.

        `ends` holds pairs of a request and that block.
        """
        freed = 0
        shared: dict[Run, list[int]] = {}
        for request, last in ends:
            if last > self._slid[request.id]:
                for group in self._sliding:
                    freed += max(min(last, request.block_count) - self._tables[request.id][group].registered, 0)
                for run in self._runs_before(last, request):
                    shared.setdefault(run, []).append(min(last, run.last) - run.first)
        return freed + sum(min(counts) for run, counts in shared.items() if len(counts) == run.references)

    def _before_window(self, request: Request, after: int = 0) -> int:
        """Return the number of leading entries of a sliding table that no query sees, `after` ticks after the next."""
        return max(request.computed + after - request.in_flight - self._past, 0) // self.block_size

    # Lookup and admission

    def lookup(self, request: Request) -> Hit:
        if not self.caches:
            return NO_HIT
        longest = (request.known - 1) // self.block_size
        matches: list[Matches] = [[] for _ in self._trees]
        for group in self._full:
            matches[group] = self._trees[group].find(request, longest)
            longest = matches[group][-1][1] if matches[group] else 0
        for group in self._sliding if longest else ():
            matches[group] = self._trees[group].find(request, longest, gaps=True)
        end = self._end_of_tail([matches[group] for group in self._sliding], longest)
        self._junction[request.id] = longest if self._full and longest > end else 0
        if not end:
            return NO_HIT
        idle = 0
        for group, runs in enumerate(matches):
            first = self._first(group, end)
            idle += sum(max(min(last, end) - max(run.first, first), 0) for run, last in runs if not run.references)
        return Hit(end, idle)

    def _end_of_tail(self, sliding: Sequence[Matches], end: int) -> int:
        """Return the longest hit, of at most `end` blocks, that has its last `_tail` blocks in all groups of `sliding`.

        A hit of fewer than `_tail` blocks must have all its blocks there.
        """
        last = -1
        while last != end:
            last = end
            for matches in sliding:
                end = min(end, _before_gap(matches, max(last - self._tail, 0), last))
        return end

    def _first(self, group: int, end: int) -> int:
        """Return the first block of a hit of `end` blocks that the next query sees."""
        return max(end - self._tail, 0) if group in self._sliding else 0

    def admit(self, request: Request, hit: Hit) -> None:
        tables = self._new_tables(request)
        for group, table in enumerate(tables) if hit.blocks else ():
            first, tree = self._first(group, hit.blocks), self._trees[group]
            table.blocks += [_NULL] * first
            self._share(table, tree, tree.find(request, hit.blocks, gaps=group in self._sliding), first)
            table.registered = hit.blocks
        self._tables[request.id] = tables
        self._slid[request.id] = max(hit.blocks - self._tail, 0)
        request.block_count = request.hashed = hit.blocks

    def _new_tables(self, request: Request) -> list[BlockTable]:
        tables: list[BlockTable] = [BlockTable() for _ in self._trees]
        tables[self._shown] = request
        return tables

    # Running requests

    def slide(self, request: Request, after: int = 0) -> None:
        """Free the blocks before the window, from the last to the first."""
        first, last = self._slid[request.id], min(self._before_window(request, after), request.block_count)
        if last <= first:
            return
        for group in self._sliding:
            self._pass(self._tables[request.id][group], self._trees[group], first, last)
        self._slid[request.id] = last
        self.version += 1

    def _pass(self, table: BlockTable, tree: PrefixTree, first: int, last: int) -> None:
        """Replace the blocks `first` to `last - 1` of `table` by the null block, and drop them."""
        tree.pass_over(table, last)
        passed: list[Run] = []
        kept: list[Run] = []
        for run in table.held_runs():
            if run.first < last < run.last:
                kept.append(tree.split(run, last))
            (passed if run.first < last else kept).append(run)
        table.runs = kept
        table.blocks[first:last] = [_NULL] * (last - first)
        self._drop(passed)

    def extend(self, request: Request, tokens: int) -> None:
        self._unsettled[request.id] = request
        self.slide(request)
        self._extend(request, tokens)

    def _extend(self, request: Request, tokens: int) -> None:
        need = blocks_for(tokens, self.block_size) - request.block_count
        if need > 0:
            for table in self._tables[request.id]:
                table.blocks += self._take(need)
            request.block_count += need
            self.version += 1  # if eviction shortens a hit, a request may need fewer blocks

    def register(self, request: Request, tokens: int) -> None:
        first, full = request.hashed, tokens // self.block_size
        if not self.caches or full <= first:
            return
        for group, (tree, table) in enumerate(zip(self._trees, self._tables[request.id], strict=True)):
            if group in self._full:
                tree.register(request, table, full)
            else:
                for begin, end in self._kept(request, first, full):
                    tree.pass_over(table, begin)
                    tree.register(request, table, end)
                tree.pass_over(table, full)
        request.hashed = full
        self.version += 1

    def _kept(self, request: Request, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges of blocks from `first` to `last` of a sliding table that can be found later.

        `prefix_cache_retention_interval` decides. The end of the prompt is always included, and so is the end of a
        prefix that was cached for full attention.
        """
        segment, tail = self._segment, self._tail
        if 0 < segment <= tail:
            return [(first, last)]
        ends = [(request.prompt_len - 1) // self.block_size, self._junction.get(request.id, 0)]
        if segment:
            ends += range((first // segment + 1) * segment, last + tail, segment)
        return [(max(end - tail, first), min(end, last)) for end in sorted(ends) if end - tail < last and end > first]

    def forget(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        for tree, table in zip(self._trees, self._tables[request.id], strict=True):
            self._forget(table, tree, full)
        request.hashed = min(request.hashed, full)

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        for after in range(steps):
            starts, fills = decodes.at_block_start(after), decodes.at_block_start(after + 1 - lag)
            slides = decodes.at_block_start(after - lag - self._past)
            if not lag:  # the previous tick may have had one more step in flight
                slides = slides | decodes.at_block_start(after - 1 - self._past)
            if not (starts or fills or slides or self._unsettled):
                continue
            for request in sorted((starts | fills | slides | self._settle(decodes, lag)).values(), key=by_admission):
                self.slide(request, after)
                if request.id in starts:
                    self._extend(request, request.computed + after + 1)
                if request.id in fills:
                    self.register(request, request.computed + after + 1 - lag)
        decodes.lag = lag

    def _settle(self, decodes: DecodeSet, lag: int) -> dict[int, Request]:
        """Return the members that may have to free more blocks than a tick would, because they just joined."""
        members = {id: request for id, request in self._unsettled.items() if id in decodes.members}
        for id, request in members.items():
            if request.in_flight <= lag:
                del self._unsettled[id]
        return members

    def release(self, request: Request, may_return: bool = False) -> None:
        for table in self._tables.pop(request.id, ()):
            self._give_back(request, table)
        for state in (self._slid, self._junction, self._unsettled):
            state.pop(request.id, None)
        request.runs, request.blocks = [], []
        request.block_count = request.hashed = request.registered = 0
        self.version += 1

    def _give_back(self, request: Request, table: BlockTable) -> None:
        """Drop all blocks of `table`, a table of `request`."""
        self._put_first(request.block_count - table.registered, table.blocks[table.registered :])
        self._drop(table.held_runs())

    def check(self, requests: Iterable[Request]) -> None:
        references: Counter[Run] = Counter()
        used = 0
        for request in requests:
            for group, table in enumerate(self._tables.get(request.id, ())):
                slid = self._slid[request.id] if group in self._sliding else 0
                used += self._check_table(table, slid, request.block_count, references)
        self._check_free(used, references)


def _before_gap(matches: Matches, first: int, last: int) -> int:
    """Return where the last gap of `matches` between blocks `first` and `last` begins; `last` if there is no gap."""
    begin = last
    for run, end in reversed(matches):
        if begin <= first:
            break
        if end < begin:
            return end
        begin = min(begin, run.first)
    return last if begin <= first else 0


def block_tables(pool: KvBlocks) -> Callable[[Request], Sequence[Sequence[int]]]:
    """Return a function that returns the block tables of a running request, one for each group of layers."""
    return pool.tables if isinstance(pool, GroupedPool) else lambda request: (request.blocks,)
