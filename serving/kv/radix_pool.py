"""KV memory as SGLang keeps it: pages that requests own, and pages of a radix tree that requests share.

A request takes pages as its tokens need them. A checkpoint hands its full pages to the tree, or drops those that the
tree has already, and locks them there. Pages of the tree without locks are evicted, whole leaves at a time, when fewer
pages are available than asked for. So more may be evicted than is needed, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.kv.blocks import NO_HIT, Hit
from serving.kv.content import Spans
from serving.kv.radix_tree import RadixNode, RadixTree
from serving.request import Request
from serving.workload import Span


class RadixPool:
    """The `config.num_blocks - 1` pages of one engine; `content` is None without a prefix cache.

    Attributes:
        available: number of pages that neither a request nor the tree has
        tree: the cached pages
    """

    counts_only = False
    defers = True

    def __init__(self, config: SchedulerConfig, content: Spans | None) -> None:
        self.page = config.block_size
        self.total = self.available = config.num_blocks - 1
        self.version = 0
        self.caches = content is not None
        self.tree = RadixTree(config.block_size)
        self._content = content
        self._locked: dict[int, RadixNode] = {}  # last locked node, by request id

    @property
    def evictable(self) -> int:
        """The number of cached pages that no request uses."""
        return (self.tree.tokens - self.tree.locked_tokens) // self.page

    @property
    def free(self) -> int:
        return self.available + self.evictable

    def spans(self, request: Request) -> Sequence[Span]:
        return () if self._content is None else self._content.spans(request)

    def match(self, request: Request, tokens: int) -> RadixNode:
        """Return the node where the cached prefix of `request` ends, of at most `tokens` tokens."""
        return self.tree.root if self._content is None else self.tree.match(self._content.spans(request), tokens)

    def hold(self, request: Request, node: RadixNode) -> None:
        """Let an admitted request use the pages up to `node`, which is locked for it."""
        self._locked[request.id] = node
        request.registered = request.block_count = node.end // self.page

    def make_room(self, pages: int) -> bool:
        """Evict leaves until `pages` are available; return whether they are."""
        while self.available < pages:
            tokens = self.tree.evict_leaf()
            if not tokens:
                return False
            self.available += tokens // self.page
        return True

    def extend(self, request: Request, tokens: int) -> None:
        need = -(-tokens // self.page) - request.block_count
        if need > 0:
            self.available -= need
            request.block_count += need

    def checkpoint(self, request: Request, tokens: int) -> None:
        """Hand the full pages of the first `tokens` tokens to the tree, and lock them there.

        The tree gets a node that ends with the prompt, so that answers can be evicted without it.
        """
        if self._content is None:
            return
        tree, page = self.tree, self.page
        spans, whole = self._content.spans(request), tokens // page * page
        known, node = tree.insert(spans, whole)
        self.available += max(known // page - request.registered, 0)
        prompt = request.prompt_len // page * page
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
        node = self._locked.pop(request.id, None)
        if node is not None:
            self.tree.unlock(node)
        request.block_count = request.registered = request.hashed = 0
        self.version += 1

    # Steady decode steps

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        self.take_for(decodes, 1, lag)

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        """Do what `steps` decode steps of the set alone do: SGLang wants a free page for each row before each step."""
        if steps:
            before = decodes.block_starts(steps - 1) if steps > 1 else 0
            self.make_room(before + len(decodes.members))
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
        for request in requests:  # the set of decodes counts the blocks of its members together
            count = request.block_count if request.decodes is None else -(-request.computed // self.page)
            private += count - request.registered
        assert self.available + self.tree.tokens // self.page + private == self.total
        assert 0 <= self.available <= self.total
