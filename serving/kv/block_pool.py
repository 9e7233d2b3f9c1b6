"""KV blocks as runs: their references, the LRU free queue, and the prefix cache.

Every block has the place that it would have in vLLM's free queue, but the time per request grows with its number of
segments, not of blocks. Free blocks without content come first in the queue and are interchangeable, so only their
number is kept. If blocks have identities, each step registers the blocks that it fills. Otherwise decodes only take
blocks, and the blocks that they fill are registered when a prefix is looked up. If requests share nothing, a request
can find only its own blocks, after a preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.block_runs import BlockTable, FreeQueue, Run, SessionQueue
from tokentwin.serving.kv.blocks import NO_HIT, CacheObserver, Hit, blocks_for
from tokentwin.serving.kv.content import Content, OwnContent, SegmentContent
from tokentwin.serving.kv.prefix_tree import PrefixTree
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import by_admission

_NO_IDS: list[int] = []  # the ids of blocks without identities


class BlockPool:
    """The `config.num_blocks` blocks of one engine. Block 0 is the null block, which no request gets.

    `content` is None if requests share nothing. With `named`, blocks have identities. Raises ValueError if more blocks
    are taken than there are.
    """

    def __init__(self, config: SchedulerConfig, content: Content | None = None, *, named: bool = False) -> None:
        self.block_size = config.block_size
        self.total = self.free = config.num_blocks - 1
        self.version = 0
        self._beside = 0  # number of blocks that requests hold beside those of their tokens
        self.counts_only = content is None
        self.caches = content is not None and config.enable_prefix_caching
        self._caching = config.enable_prefix_caching
        self._tree = PrefixTree(config.block_size, content or OwnContent())
        self._trees = [self._tree]  # a tree for each group of layers
        self._by_session = config.kv_eviction == "session"
        self._queue = SessionQueue() if self._by_session else FreeQueue()
        self._blank = self.total  # number of free blocks without content
        self._blank_ids: list[int] = []  # ids of these blocks; the last one is taken next
        self._named = False
        self._drops_last = False
        if named:
            self._name()

    def _name(self) -> None:
        self._named = True
        self._blank_ids = list(range(self.total, 0, -1))

    def drop_last_found(self) -> None:
        """Find blocks by their own tokens only, and drop the last block of each hit, as vLLM does with a KV connector.

        The head of `eagle` computed the KV in that block from a following token that may differ. Call this method
        before any block is registered.
        """
        if not self.counts_only:
            self._tree = PrefixTree(self.block_size, SegmentContent(self.block_size))
            self._trees = [self._tree]
        self._drops_last = True

    @property
    def defers(self) -> bool:
        return not self._named

    def observe(self, observer: CacheObserver) -> None:
        """Give blocks identities, and tell `observer` which blocks can be found. Call before any is registered."""
        self._name()
        self._tree.observer = observer

    def lookup(self, request: Request) -> Hit:
        matches = self._find(request)
        if not matches:
            return NO_HIT
        return Hit(matches[-1][1], sum(end - run.first for run, end in matches if not run.references))

    @property
    def observed(self) -> bool:
        """True if an observer is told which blocks can be found."""
        return self._tree.observer is not None

    def settled(self, request: Request) -> bool:
        return self._named or self._tree.settled(request, (request.known - 1) // self.block_size)

    def _find(self, request: Request) -> list[tuple[Run, int]]:
        if not (self.caches or (self._caching and request.preemptions)):
            return []
        matches = self._tree.find(request, (request.known - 1) // self.block_size)
        if self._drops_last and matches:
            run, end = matches.pop()
            if end - 1 > run.first:
                matches.append((run, end - 1))
        return matches

    def admit(self, request: Request, hit: Hit) -> None:
        if hit.blocks:
            self._share(request, self._tree, self._find(request))
            if self._by_session and request.arrived.turn and not request.preemptions:  # its session has returned
                for run in request.runs:
                    run.awaited = max(run.awaited - 1, 0)
        request.block_count = request.hashed = request.registered = hit.blocks
        if self.caches and not self._named:
            self._tree.open[f"out:{request.id}"] = request
            self.version += 1

    def _share(self, table: BlockTable, tree: PrefixTree, matches: list[tuple[Run, int]], first: int = 0) -> None:
        """Let `table` take references to the blocks in `matches`, from block `first` on."""
        for run, end in matches:
            if end > first:
                if end < run.last:
                    tree.split(run, end)
                if run.first < first:
                    run = tree.split(run, first)
                if not run.references:
                    self._queue.remove(run)
                    self.free -= end - run.first
                run.references += 1
                table.runs.append(run)
                table.blocks += run.ids

    def extend(self, request: Request, tokens: int) -> None:
        need = -(-tokens // self.block_size) - request.block_count
        if need > 0:
            ids = self._take(need)
            if ids:
                request.blocks += ids
            request.block_count += need

    def _take(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the queue, evict their content, and return their ids."""
        self.free -= count
        if self._blank >= count and not self._named:  # nearly always
            self._blank -= count
            return _NO_IDS
        if self.free < 0:
            raise ValueError(f"{-self.free} KV blocks were taken beyond those there are")
        blank = min(count, self._blank)
        self._blank -= blank
        count -= blank
        ids = self._blank_ids[len(self._blank_ids) - blank :][::-1] if self._named else _NO_IDS
        if ids:
            del self._blank_ids[-blank:]
        while count:
            run = self._queue.head
            length = run.last - run.first
            if count < length and run.node is None:
                run.last -= count
                break
            tree = self._tree if run.node is None else self._trees[run.node.group]
            evicted = tree.evict(run, count if count < length else length)
            if count >= length:
                self._queue.remove(run)
            count -= length if length < count else count
            if self._named:
                ids += evicted
        return ids

    def register(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        if full <= request.hashed:
            return
        request.hashed = full
        if self.caches:
            self._tree.register(request, request, full)
            self.version += 1

    def forget(self, request: Request, tokens: int) -> None:
        full = tokens // self.block_size
        if full >= request.hashed:
            return
        request.hashed = full
        self._forget(request, self._tree, full)

    def _forget(self, table: BlockTable, tree: PrefixTree, full: int) -> None:
        for run in table.held_runs():
            if run.last > full and run.node is not None:
                tree.lose(tree.split(run, full) if run.first < full else run)

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        if self._named:
            self.take_for(decodes, 1, lag)
        else:
            self._take(len(decodes.at_block_start()))
            decodes.lag = lag

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        if not self._named:
            self._take(decodes.block_starts(steps))
            decodes.lag = lag
            return
        for after in range(steps):
            starts, fills = decodes.at_block_start(after), decodes.at_block_start(after + 1 - lag)
            for request in _in_order((starts | fills).values()):
                if request.id in starts:
                    self.extend(request, request.computed + after + 1)
                if request.id in fills:
                    self.register(request, request.computed + after + 1 - lag)
        decodes.lag = lag

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        return decodes.block_starts(steps)

    def net_blocks_by_tick(self, decodes: DecodeSet, steps: int) -> list[int]:
        """Return the decrease of `free` at each tick, for at least `steps` ticks or one period of repeating numbers."""
        return decodes.block_starts_by_tick()

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        if self._named:
            for request in _in_order(decodes.at_block_start(after=-lag).values()):
                self.register(request, request.computed - lag)
        decodes.lag = lag

    def release(self, request: Request, may_return: bool = False) -> None:
        kept = request.hashed if self._caching else 0
        if kept > request.registered:
            if self.caches or may_return:
                self._tree.register(request, request, kept)
            else:
                self._append_unfound(kept - request.registered)
        else:
            kept = request.registered
        self._put_first(request.block_count - kept, request.blocks[kept:])
        if request.runs:
            runs = request.held_runs()
            if self._by_session and not may_return and _returns(request):
                for run in runs:
                    run.awaited += 1
            self._drop(runs)
            request.runs.clear()
        request.blocks.clear()
        request.block_count = request.hashed = request.registered = 0
        if self.caches:
            self._tree.open.pop(f"out:{request.id}", None)
        self.version += 1

    def _drop(self, runs: list[Run]) -> None:
        """Drop one reference to each of a table's `runs`, from the last to the first."""
        for run in reversed(runs):
            run.references -= 1
            if not run.references:
                if run.node is None:
                    self._put_first(run.last - run.first, run.ids)
                else:
                    self.free += run.last - run.first
                    self._queue.append(run)

    def _put_first(self, count: int, ids: list[int]) -> None:
        """Free `count` blocks without content; they are taken before all others."""
        self.free += count
        self._blank += count
        if ids:
            self._blank_ids += reversed(ids)

    def _append_unfound(self, count: int) -> None:
        """Free `count` blocks that no request will look up; they are taken after all blocks that are free now."""
        self.free += count
        tail = self._queue.tail
        if tail is not None and tail.node is None:
            tail.last += count
        else:
            run = Run(None, 0, count, [])
            run.references = 0
            self._queue.append(run)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the counts equal a recount over `requests`, which are all live requests."""
        references: Counter[Run] = Counter()
        used = self._beside
        for request in requests:
            decodes = request.decodes is not None and not self._named
            length = blocks_for(request.computed, self.block_size) if decodes else request.block_count
            used += self._check_table(request, 0, length, references)
        self._check_free(used, references)

    def _check_table(self, table: BlockTable, first: int, length: int, references: Counter[Run]) -> int:
        """Check a table of the blocks `first` to `length - 1`, and count its references to runs in `references`.

        Returns the number of blocks that are not registered.
        """
        runs = table.held_runs()
        ends = [run.last for run in runs]
        assert [run.first for run in runs] == [first, *ends][: len(runs)]
        assert table.registered == (ends[-1] if runs else first)
        references.update(runs)
        if self._named:
            assert len(table.blocks) == length
            assert table.blocks[: table.registered] == [0] * first + [id for run in runs for id in run.ids]
            assert len({*table.blocks[first:], 0}) == length - first + 1
        return length - table.registered

    def _check_free(self, used: int, references: Counter[Run]) -> None:
        """Check that the blocks in use are those of `references` and `used` others, and that all others are free."""
        assert all(run.references == count for run, count in references.items())
        free = self._queue.runs()
        assert not any(run.references for run in free)
        assert self.free == self._blank + sum(run.last - run.first for run in free)
        assert self.total - self.free == used + sum(run.last - run.first for run in references)
        runs = [run for run in [*free, *references] if run.node is not None]
        for group, tree in enumerate(self._trees):
            tree.check(run for run in runs if run.node is not None and run.node.group == group)
        if self._named:
            assert self._blank == len(self._blank_ids)


def _returns(request: Request) -> bool:
    """Return whether another turn of the request's session is expected."""
    return request.arrived.session != "" and not request.arrived.ends_session


def _in_order(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=by_admission)


class StatePool(BlockPool):
    """A pool in which an admitted request has `config.state_blocks` more blocks than its `block_count`."""

    def __init__(self, config: SchedulerConfig, content: Content | None = None) -> None:
        super().__init__(config, content)
        self._states = config.state_blocks
        self._admitted: set[int] = set()

    def admit(self, request: Request, hit: Hit) -> None:
        super().admit(request, hit)
        self._admitted.add(request.id)
        self._take(self._states)
        self._beside += self._states

    def release(self, request: Request, may_return: bool = False) -> None:
        super().release(request, may_return)
        if request.id in self._admitted:
            self._admitted.remove(request.id)
            self._put_first(self._states, [])
            self._beside -= self._states
