"""A tree that finds KV blocks by their content, comparing whole sequences instead of single blocks.

The time for a prompt grows with the number of sequences that it shares with other prompts, not with its number of
blocks. The tree is a radix tree as in SGLang (https://arxiv.org/abs/2312.07104). As in vLLM, it does not merge blocks
with equal content: the block that was registered first is found, and another one replaces it when it is evicted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from tokentwin.serving.kv.block_runs import BlockTable, Branch, Node, Run
from tokentwin.serving.kv.blocks import CacheObserver
from tokentwin.serving.kv.content import Spans
from tokentwin.serving.request import Request
from tokentwin.serving.workload import Name, Span


class PrefixTree:
    """The runs of blocks of one `group` of layers, by content. The pool manages their references.

    Attributes:
        open: by the name of their output: requests that may have full blocks that are not registered yet
        observer: object that is told which blocks can be found; None if there is none
    """

    def __init__(self, block_size: int, content: Spans, group: int = 0) -> None:
        self.open: dict[Name, Request] = {}
        self.observer: CacheObserver | None = None
        self._group = group
        self._size = block_size
        self._content = content
        self._lookahead = content.lookahead
        self._nodes: dict[Branch, Node] = {}

    def find(self, request: Request, most: int, gaps: bool = False) -> list[tuple[Run, int]]:
        """Return the runs that hold the leading blocks of `request`, each with the end of its matching blocks.

        At most `most` blocks match. With `gaps`, runs after blocks that cannot be found are included.
        """
        matches: list[tuple[Run, int]] = []
        spans = self._content.spans(request)
        self._catch_up(request, spans)
        block = end = span = 0
        node: Node | None = None
        while block < most and span < len(spans):
            name, begin, _ = spans[span]
            node = self._nodes.get((node, end, name, begin))
            if node is None:
                break
            end, span = node.follow(spans, span)
            last = (end - self._lookahead) // self._size
            if last > most:
                last = most
            for run in node.runs:
                if run.first >= last or (run.first != block and not gaps):
                    break
                block = run.last if run.last < last else last
                matches.append((run, block))
            if block < last and not gaps:
                break
        return matches

    def settled(self, request: Request, most: int) -> bool:
        """Return whether only `register` can make the result of `find` longer, and no decode of a request in `open`."""
        matches = self.find(request, most)
        block = matches[-1][1] if matches else 0
        spans = self._content.spans(request)
        return block == most or all(
            self.open.get(name, request) is request for name, _, end in spans if end > block * self._size
        )

    def register(self, request: Request, table: BlockTable, full: int) -> None:
        """Let the first `full` blocks of `table`, a block table of `request`, be found from now on."""
        first = table.registered
        if full > first:
            spans = self._content.spans(request)
            self._catch_up(request, spans)
            self._register(table, spans, full)
            if self.observer is not None:
                self.observer.stored(request, first, full)

    def pass_over(self, table: BlockTable, until: int) -> None:
        """Mark the unregistered blocks of `table` before `until` as handled, so that they are never found."""
        first = table.registered
        if until > first:
            tail = table.runs[-1] if table.runs else None
            if tail is not None and tail.node is None and tail.references == 1 and tail.last == first:
                tail.last = until
                tail.ids += table.blocks[first:until]
            else:
                table.runs.append(Run(None, first, until, table.blocks[first:until]))
            table.registered = until

    def _catch_up(self, request: Request, spans: Sequence[Span]) -> None:
        """Register blocks that other requests have filled with output that is part of the sequence of `request`.

        Only blocks with a request's own output can be unregistered; all others are registered when they are filled.
        """
        opened = self.open
        for name, _, _ in spans if opened else ():
            if name in opened and (other := opened[name]) is not request:
                full = other.full_blocks(self._size)
                if full > other.registered:
                    self._register(other, self._content.spans(other), full)

    def _register(self, table: BlockTable, spans: Sequence[Span], full: int) -> None:
        block = table.registered
        tail = table.runs[-1] if table.runs else None
        while tail is not None and tail.last < block:
            tail = tail.rest
        end = span = 0
        node: Node | None = None
        while block < full:
            name, begin, _ = spans[span]
            node = self._node(node, (node, end, name, begin), spans, span)
            end, span = node.follow(spans, span)
            last = (end - self._lookahead) // self._size
            if last > full:
                last = full
            if last > block:
                tail = self._add(table, node, tail, block, last)
                block = last
        table.registered = full

    def _node(self, parent: Node | None, branch: Branch, spans: Sequence[Span], span: int) -> Node:
        node = self._nodes.get(branch)
        if node is None:
            node = self._nodes[branch] = Node(self._group, parent, branch, spans, span)
            if parent is not None:
                parent.children += 1
        return node

    def _add(self, table: BlockTable, node: Node, tail: Run | None, first: int, last: int) -> Run | None:
        """Add the blocks `first` to `last - 1` of `table` to `node`; return the last of their runs, perhaps `tail`."""
        runs, blocks = node.runs, table.blocks
        while runs and first < last and first < runs[-1].last:  # the node has these blocks, or later ones
            end = _found_to(runs, first)
            until = min(end if end > first else next(run.first for run in runs if run.first > first), last)
            tail = Run(node, first, until, blocks[first:until])
            if end > first:
                node.spares.append(tail)
            else:
                insort(runs, tail, key=_first)
            table.runs.append(tail)
            first = until
        if first < last:
            if tail is not None and runs and runs[-1] is tail and tail.references == 1:
                tail.last = last
                tail.ids += blocks[first:last]
            else:
                tail = Run(node, first, last, blocks[first:last])
                runs.append(tail)
                table.runs.append(tail)
        return tail

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` before block `at`, and return the part from there on."""
        upper, node = run.split(at), run.node
        if node is not None:
            runs = node.spares if run in node.spares else node.runs
            runs.insert(runs.index(run) + 1, upper)
        return upper

    def evict(self, run: Run, count: int) -> list[int]:
        """Evict the last `count` blocks of `run`, and return their ids, from the last to the first."""
        node, end = run.node, run.last
        ids = run.cut(count)
        if node is not None:
            findable = not node.spares or run in node.runs
            if run.first == run.last:
                runs = node.runs if findable else node.spares
                if runs[-1] is run:  # nearly always: later blocks of a prefix are evicted first
                    runs.pop()
                else:
                    runs.remove(run)
            if findable and node.spares:
                self._promote(node, run.last, end)
            if not node.runs:
                self._prune(node)
            if self.observer is not None:
                for id in ids:
                    self.observer.removed(id)
        return ids

    def lose(self, run: Run) -> None:
        """Remove `run` from the tree, so that it is not found any more."""
        node = run.node
        if node is not None:
            findable = run in node.runs
            (node.runs if findable else node.spares).remove(run)
            if findable:
                self._promote(node, run.first, run.last)
            self._prune(node)
            run.node = None
            if self.observer is not None:
                for id in run.ids:
                    self.observer.removed(id)

    def _promote(self, node: Node, first: int, last: int) -> None:
        """Replace the blocks `first` to `last - 1`, which are gone, by the spares that were registered first."""
        for run in node.spares:
            begin, end = max(first, run.first), min(last, run.last)
            if begin < end:
                if run.last > end:
                    self.split(run, end)
                if run.first < begin:
                    run = self.split(run, begin)
                node.spares.remove(run)
                node.runs.append(run)
                node.runs.sort(key=_first)
                self._promote(node, first, begin)
                self._promote(node, end, last)
                return

    def _prune(self, node: Node | None) -> None:
        """Remove `node` and its ancestors from the tree, as far as they have no runs and no children."""
        while node is not None and not (node.runs or node.spares or node.children or node.lost):
            del self._nodes[node.branch]
            node.lost = True
            node = node.parent
            if node is not None:
                node.children -= 1

    def check(self, runs: Iterable[Run]) -> None:
        """Raise AssertionError unless the tree holds exactly these `runs`, each in its place."""
        nodes = list(self._nodes.values())
        kept = [run for node in nodes for run in node.runs + node.spares]
        assert sorted(map(id, kept)) == sorted(id(run) for run in runs)
        assert sum(node.children for node in nodes) == sum(node.parent is not None for node in nodes)
        for node in nodes:
            assert all(run.node is node and run.first < run.last for run in node.runs + node.spares)
            assert all(one.last <= next.first for one, next in zip(node.runs, node.runs[1:], strict=False))
            covered = {block for run in node.runs for block in range(run.first, run.last)}
            assert all(covered.issuperset(range(run.first, run.last)) for run in node.spares)
            assert node.runs or node.children


def _first(run: Run) -> int:
    return run.first


def _found_to(runs: Sequence[Run], at: int) -> int:
    """Return the end of the blocks that `runs` hold without a gap from block `at` on. The runs are in order."""
    for run in runs:
        if run.first <= at < run.last:
            at = run.last
    return at
