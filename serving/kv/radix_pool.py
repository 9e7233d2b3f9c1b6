"""KV memory as SGLang keeps it: pages that requests own, and pages of a radix tree that requests share.

A request takes pages as its tokens need them. A checkpoint hands its full pages to the tree, or drops those that the
tree has already, and locks them there. Pages of the tree without locks are evicted, whole leaves at a time, when fewer
pages are available than asked for. So more may be evicted than is needed, as in SGLang.

In a real engine pages have identities. Where the tree has pages already, a checkpoint gives the request the tree's
pages, in a new list, so that the engine notices. Steps in flight still read the old pages; later steps may write there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import NO_HIT, Hit
from tokentwin.serving.kv.content import Spans
from tokentwin.serving.kv.radix_tree import RadixNode, RadixTree
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import by_admission


class RadixPool:
    """The `config.num_blocks - 1` pages of one engine; `content` is None without a prefix cache.

    With `named`, pages have identities: 1 to `config.num_blocks - 1`.

    Attributes:
        available: number of pages that neither a request nor the tree has
        tree: the cached pages
    """

    counts_only = False
    defers = True

    def __init__(self, config: SchedulerConfig, content: Spans | None, *, named: bool = False) -> None:
        self.page = config.block_size
        self.total = self.available = config.num_blocks - 1
        self.version = 0
        self.caches = content is not None
        speculative = config.speculative
        self.tree = RadixTree(config.block_size, speculative.num_hash_lookahead_tokens if speculative else 0)
        self._content = content
        self._locked: dict[int, RadixNode] = {}  # last locked node, by request id
        self._named = named
        self._ids = list(range(self.total, 0, -1)) if named else []  # available pages; the last one is taken next

    @property
    def evictable(self) -> int:
        """The number of cached pages that no request uses."""
        return (self.tree.tokens - self.tree.locked_tokens) // self.page

    @property
    def free(self) -> int:
        return self.available + self.evictable

    def opening(self, request: Request, tokens: int) -> Hashable:
        """Return a value that two requests share if and only if their first `tokens` tokens are equal."""
        return request.id if self._content is None else self._content.opening(request, tokens)

    def match(self, request: Request, tokens: int) -> RadixNode:
        """Return the node where the cached prefix of `request` ends, of at most `tokens` tokens.

        It is the root for a request that reads no cached prefix, because all logits of its prompt are wanted.
        """
        if self._content is None or request.arrived.skip_reading_prefix_cache:
            return self.tree.root
        return self.tree.match(self._content.spans(request), tokens)

    def hold(self, request: Request, node: RadixNode) -> None:
        """Let an admitted request use the pages up to `node`, which is locked for it."""
        self._locked[request.id] = node
        request.registered = request.block_count = node.end // self.page
        if self._named:
            request.blocks = self.tree.ids_to(node)

    def make_room(self, pages: int) -> bool:
        """Evict leaves until `pages` are available; return whether they are."""
        while self.available < pages:
            leaf = self.tree.evict_leaf()
            if leaf is None:
                return False
            self.available += (leaf.end - leaf.start) // self.page
            if self._named:
                self._ids += leaf.ids
        return True

    def extend(self, request: Request, tokens: int) -> None:
        need = -(-tokens // self.page) - request.block_count
        if need > 0:
            self.available -= need
            request.block_count += need
            if self._named:
                request.blocks += self._ids[-need:]
                del self._ids[-need:]

    def checkpoint(self, request: Request, tokens: int) -> None:
        """Hand the full pages of the first `tokens` tokens to the tree, and lock them there.

        The tree gets a node that ends with the prompt, so that answers can be evicted without it.
        """
        if self._content is None:
            return
        tree, page = self.tree, self.page
        spans, whole = self._content.spans(request), tree.whole(tokens)
        known, node = tree.insert(spans, whole, request.blocks)
        doubled = known // page - request.registered  # pages that the tree has from another request
        if doubled > 0:
            self.available += doubled
            if self._named:
                self._ids += request.blocks[request.registered : known // page]
                request.blocks = tree.ids_to(node) + request.blocks[whole // page :]
        prompt = tree.whole(request.prompt_len)
        if 0 < prompt < whole:
            tree.insert(spans, prompt)
        old = self._locked.get(request.id)
        if old is not None:
            tree.unlock(old)
        tree.lock(node)
        self._locked[request.id] = node
        request.registered = whole // page
        self.version += 1

    def drop(self, request: Request) -> None:
        """Free the pages of a request that the tree does not have, and unlock the others."""
        self.available += request.block_count - request.registered
        if self._named:
            self._ids += request.blocks[request.registered :]
            request.blocks = []
        node = self._locked.pop(request.id, None)
        if node is not None:
            self.tree.unlock(node)
        request.block_count = request.registered = request.hashed = 0
        self.version += 1

    # Steady decode steps

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        if self._named:
            self._extend_in(decodes, 0)
        else:
            self.available -= len(decodes.at_block_start())
        decodes.lag = lag

    def _extend_in(self, decodes: DecodeSet, ticks: int) -> None:
        """Give pages to the members that begin one in the tick after `ticks` more."""
        for request in sorted(decodes.at_block_start(ticks).values(), key=by_admission):
            self.extend(request, request.computed + ticks + 1)

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        """Do what `steps` decode steps of the set alone do: SGLang wants a free page for each row before each step."""
        if steps:
            before = decodes.block_starts(steps - 1) if steps > 1 else 0
            self.make_room(before + len(decodes.members))
            if self._named:
                for tick in range(steps):
                    self._extend_in(decodes, tick)
            else:
                self.available -= decodes.block_starts(steps)
            decodes.lag = lag

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        return decodes.block_starts(steps)

    def net_blocks_by_tick(self, decodes: DecodeSet, steps: int) -> list[int]:
        """Return the decrease of `free` at each tick, for one period of repeating numbers."""
        return decodes.block_starts_by_tick()

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        decodes.lag = lag

    # The rest of the protocol of KV memory. SGLang's scheduler uses `hold`, `checkpoint` and `drop` instead.

    def settled(self, request: Request) -> bool:
        return False

    def lookup(self, request: Request) -> Hit:
        return NO_HIT

    def admit(self, request: Request, hit: Hit) -> None:
        raise NotImplementedError

    def register(self, request: Request, tokens: int) -> None:
        raise NotImplementedError

    def forget(self, request: Request, tokens: int) -> None:
        raise NotImplementedError

    def release(self, request: Request, may_return: bool = False) -> None:
        self.drop(request)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the counts equal a recount over `requests`, which are all live requests."""
        self.tree.check()
        private = 0
        ids = list(self._ids)
        for request in requests:  # the set of decodes counts the blocks of its members together
            count = request.block_count if request.decodes is None else -(-request.computed // self.page)
            private += count - request.registered
            if self._named:
                node = self._locked.get(request.id, self.tree.root)
                assert len(request.blocks) == count
                assert request.blocks[: request.registered] == self.tree.ids_to(node)[: request.registered]
                ids += request.blocks[request.registered :]
        assert self.available + self.tree.tokens // self.page + private == self.total
        assert 0 <= self.available <= self.total
        if self._named:
            assert len(self._ids) == self.available
            assert sorted(ids + self.tree.ids()) == list(range(1, self.total + 1))
