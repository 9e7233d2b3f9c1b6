"""The radix tree of SGLang's prefix cache: nodes of whole pages, locks, and eviction of the leaf used longest ago.

A node is a part of a sequence, in tokens, and equal prefixes share their nodes. A node that is matched or extended in
its middle is split there. As in SGLang's `UnifiedTreeCore`, a match marks its whole path as used, the end first, and a
split marks the rest of the node as used. Only leaves without locks can be evicted.

Tokens are compared as in `tokentwin.serving.kv.content`: they are equal if they have the same position in spans with
the same name. So a node needs no token of its own, only the spans of the sequence that made it.

With a `lookahead` of 1, a token is equal only if the one after it is equal, too, as for drafts from the target's hidden
states (EAGLE): the KV of a draft's layer depends on both. SGLang calls these pairs bigrams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from tokentwin.serving.workload import Name, Span

_DEEPEST = 1 << 20  # more than the number of nodes on a path


class RadixNode:
    """Tokens `start` to `end - 1` of the sequences through it.

    Attributes:
        spans: spans of a sequence through this node; number `first` is that of its first token
        ids: physical ids of its pages; empty if pages have no identities
        children: nodes that go on after this one, by their first pages
        locks: number of requests that keep this node and its ancestors
        used: when the node was last used; larger is later
        queued: True if the node is among the candidates for eviction
    """

    __slots__ = ("children", "end", "first", "ids", "locks", "parent", "queued", "spans", "start", "used")

    def __init__(
        self, parent: RadixNode | None, spans: Sequence[Span], first: int, start: int, end: int, ids: list[int]
    ) -> None:
        self.parent = parent
        self.ids = ids
        self.spans = spans
        self.first = first
        self.start = start
        self.end = end
        self.children: dict[Page, RadixNode] = {}
        self.locks = 0
        self.used = 0
        self.queued = False

    def common(self, spans: Sequence[Span], number: int, until: int, beyond: int) -> tuple[int, int]:
        """Compare a sequence with this node and `beyond` tokens more, from span `number` of the sequence on.

        The comparison ends at position `until`.

        Returns the position at which they differ or the comparison ends, and the number of the sequence's span there.
        """
        at, own = self.start, self.first
        until = min(until, self.end + beyond)
        while at < until:
            name, begin, end = self.spans[own]
            other, other_begin, other_end = spans[number]
            if name != other or begin != other_begin:
                break
            at = min(end, other_end, until)
            if at == end:
                own += 1
            if at == other_end:
                number += 1
        return at, number


# The first page of a node: name and begin of each span in it, with the end of all but the last
Page = tuple[tuple[Name, int, int], ...]


class RadixTree:
    """The nodes of one cache with pages of `page` tokens.

    Attributes:
        tokens: number of tokens in all nodes
        locked_tokens: number of tokens in nodes with locks
    """

    def __init__(self, page: int, lookahead: int = 0) -> None:
        self.root = RadixNode(None, (), 0, 0, 0, [])
        self.tokens = self.locked_tokens = 0
        self._page = page
        self._lookahead = lookahead
        self._clock = 0
        self._candidates: list[tuple[int, int, RadixNode]] = []  # heap; `used` may have grown since
        self._pushes = 0

    def whole(self, tokens: int) -> int:
        """Return how many of the first `tokens` tokens of a sequence the tree can have."""
        return max(tokens - self._lookahead, 0) // self._page * self._page

    def match(self, spans: Sequence[Span], tokens: int) -> RadixNode:
        """Return the last node of the longest known prefix of at most `tokens` tokens, and mark its path as used."""
        tokens = self.whole(tokens)
        node = self.root
        if not tokens:
            return node
        number = 0
        while node.end < tokens and (child := node.children.get(self._first_page(spans, number, node.end))) is not None:
            at, number = self._common(child, spans, number, tokens)
            if at < child.end:
                node = self._split(child, at // self._page * self._page)
                break
            node = child
        self._clock += _DEEPEST
        used, end = self._clock, node
        while True:
            end.used = used
            used -= 1
            if end.parent is None:
                return node
            end = end.parent

    def insert(self, spans: Sequence[Span], tokens: int, ids: Sequence[int] = ()) -> tuple[int, RadixNode]:
        """Add the first `tokens` tokens, `whole` pages; return how many were known, and the last node.

        `ids` are the pages of the sequence. The tree keeps those of the tokens that were not known.
        """
        node, number = self.root, 0
        self._touch(node)
        while node.end < tokens and (child := node.children.get(self._first_page(spans, number, node.end))) is not None:
            self._touch(child)
            at, number = self._common(child, spans, number, tokens)
            if at < child.end:
                node = self._split(child, at // self._page * self._page)
                number = _span_at(spans, node.end)
                break
            node = child
        known = node.end
        if known < tokens:
            pages = slice(known // self._page, tokens // self._page)
            leaf = RadixNode(node, spans, number, known, tokens, list(ids[pages]))
            self._touch(leaf)
            node.children[self._first_page(spans, number, known)] = leaf
            self.tokens += tokens - known
            self._offer(leaf)
            node = leaf
        return known, node

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and its ancestors until `unlock`."""
        while node.parent is not None:
            if not node.locks:
                self.locked_tokens += node.end - node.start
            node.locks += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                self.locked_tokens -= node.end - node.start
                self._offer(node)
            node = node.parent

    def evict_leaf(self) -> RadixNode | None:
        """Evict the leaf without locks that was used longest ago, and return it; None if there is none."""
        candidates = self._candidates
        while candidates:
            used, _, node = heappop(candidates)
            node.queued = False
            parent = node.parent
            if node.locks or node.children or parent is None:
                continue
            if node.used != used:
                self._offer(node)
                continue
            del parent.children[self._first_page(node.spans, node.first, node.start)]
            node.parent = None
            self.tokens -= node.end - node.start
            self._offer(parent)
            return node
        return None

    def ids_to(self, node: RadixNode) -> list[int]:
        """Return the pages from the root to the end of `node`."""
        path = []
        while node.parent is not None:
            path.append(node.ids)
            node = node.parent
        return [id for ids in reversed(path) for id in ids]

    def heaviest_first(self, weights: dict[RadixNode, int]) -> Iterator[RadixNode]:
        """Yield all nodes below before above; of siblings, the ones with more weight first (SGLang's `dfs-weight`).

        `weights` has the number of requests that end at each node. A node weighs as much as its children.
        """
        order: list[RadixNode] = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += node.children.values()
        weights = dict(weights)
        for node in reversed(order):
            weights[node] = weights.get(node, 0) + sum(weights[child] for child in node.children.values())
        walk: list[tuple[RadixNode, bool]] = [(self.root, False)]
        while walk:
            node, below_done = walk.pop()
            if below_done:
                yield node
                continue
            walk.append((node, True))
            children = sorted(node.children.values(), key=lambda child: -weights[child])
            walk += [(child, False) for child in reversed(children)]

    def _common(self, child: RadixNode, spans: Sequence[Span], number: int, tokens: int) -> tuple[int, int]:
        if not self._lookahead:
            return child.common(spans, number, tokens, 0)
        at = child.common(spans, number, tokens + self._lookahead, self._lookahead)[0] - self._lookahead
        return at, _span_at(spans, at)

    def _touch(self, node: RadixNode) -> None:
        self._clock += _DEEPEST
        node.used = self._clock

    def _offer(self, node: RadixNode) -> None:
        """Make `node` a candidate for eviction if it is a leaf without locks."""
        if not (node.queued or node.locks or node.children or node.parent is None):
            node.queued = True
            self._pushes += 1
            heappush(self._candidates, (node.used, self._pushes, node))

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut `node` before position `at`, and return a new node with the part before."""
        parent = node.parent
        assert parent is not None and node.start < at < node.end
        pages = (at - node.start) // self._page
        upper = RadixNode(parent, node.spans, node.first, node.start, at, node.ids[:pages])
        del node.ids[:pages]
        self._touch(upper)
        upper.locks = node.locks
        parent.children[self._first_page(node.spans, node.first, node.start)] = upper
        node.start, node.parent = at, upper
        node.first = _span_at(node.spans, at)
        upper.children[self._first_page(node.spans, node.first, at)] = node
        self._touch(node)
        return upper

    def _first_page(self, spans: Sequence[Span], number: int, at: int) -> Page:
        """Return the key of the page from position `at` on, in span `number`."""
        name, begin, end = spans[number]
        until = at + self._page + self._lookahead
        if until <= end:  # nearly always
            return ((name, begin, 0),)
        pieces = []
        while end < until:
            pieces.append((name, begin, end))
            number += 1
            name, begin, end = spans[number]
        pieces.append((name, begin, 0))
        return tuple(pieces)

    def _nodes(self) -> list[RadixNode]:
        nodes = list(self.root.children.values())
        for node in nodes:  # which grows
            nodes += node.children.values()
        return nodes

    def ids(self) -> list[int]:
        """Return the pages of all nodes."""
        return [id for node in self._nodes() for id in node.ids]

    def check(self) -> None:
        """Raise AssertionError unless the counts equal a recount (tests call this)."""
        nodes = self._nodes()
        assert self.tokens == sum(node.end - node.start for node in nodes)
        assert self.locked_tokens == sum(node.end - node.start for node in nodes if node.locks)
        for node in nodes:
            parent = node.parent
            assert parent is not None and node.start == parent.end and node.start < node.end
            assert parent.parent is None or parent.locks >= sum(child.locks for child in parent.children.values())
            assert node.start % self._page == node.end % self._page == 0
            assert len(node.ids) in (0, (node.end - node.start) // self._page)
            assert parent.children[self._first_page(node.spans, node.first, node.start)] is node
            assert node.locks or node.children or node.queued


def _span_at(spans: Sequence[Span], at: int) -> int:
    """Return the number of the span that has position `at`, or the number of spans."""
    low, high = 0, len(spans)
    while low < high:
        middle = (low + high) // 2
        if spans[middle][2] > at:
            high = middle
        else:
            low = middle + 1
    return low
