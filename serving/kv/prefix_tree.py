"""Finding KV blocks by content, a sequence at a time.

A prompt costs what it has in common with others, and not its blocks. A radix tree as in SGLang
(https://arxiv.org/abs/2312.07104), but blocks with equal content are not merged, as they are not in vLLM: the one
registered first is found, and the others take its place when it is evicted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from serving.kv.block_runs import BlockTable, Branch, Node, Run
from serving.kv.blocks import CacheObserver
from serving.kv.content import Spans
from serving.request import Request
from serving.workload import Name, Span


class PrefixTree:
    """Which runs of blocks hold which content in one `group` of layers. Whether they are referenced is the pool's
    business.

    open      requests of which more blocks may be full than are registered, by the name of their output
    observer  told of what can be found, if anybody
    """

    def __init__(self, block_size: int, content: Spans, group: int = 0) -> None:
        self.open: dict[Name, Request] = {}
        self.observer: CacheObserver | None = None
        self._group = group
        self._size = block_size
        self._content = content
        self._ahead = content.ahead
        self._nodes: dict[Branch, Node] = {}

    def find(self, request: Request, most: int, gaps: bool = False) -> list[tuple[Run, int]]:
        """Runs that hold the leading blocks of `request`, at most `most` blocks, and up to which block each counts.

        With `gaps` those after blocks that cannot be found, too.
        """
        found: list[tuple[Run, int]] = []
        spans = self._content.spans(request)
        self._catch_up(request, spans)
        at = end = span = 0
        node: Node | None = None
        while at < most and span < len(spans):
            name, begin, _ = spans[span]
            node = self._nodes.get((node, end, name, begin))
            if node is None:
                break
            end, span = node.follow(spans, span)
            last = (end - self._ahead) // self._size
            if last > most:
                last = most
            for run in node.runs:
                if run.first >= last or (run.first != at and not gaps):
                    break
                at = run.last if run.last < last else last
                found.append((run, at))
            if at < last and not gaps:
                break
        return found

    def settled(self, request: Request, most: int) -> bool:
        """Whether what `find` finds grows only by `register`, and not because a request in `open` goes on."""
        found = self.find(request, most)
        at = found[-1][1] if found else 0
        spans = self._content.spans(request)
        return at == most or all(
            self.open.get(name, request) is request for name, _, end in spans if end > at * self._size
        )

    def register(self, request: Request, table: BlockTable, full: int) -> None:
        """The first `full` blocks of `table`, by which `request` holds them, can be found from now on."""
        first = table.registered
        if full > first:
            spans = self._content.spans(request)
            self._catch_up(request, spans)
            self._register(table, spans, full)
            if self.observer is not None:
                self.observer.stored(request, first, full)

    def pass_over(self, table: BlockTable, until: int) -> None:
        """The blocks of `table` before `until` that are not registered cannot be found."""
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
        """What others have filled of a sequence is registered before anything is done for `request`.

        That is their own output: all else is registered as it is filled.
        """
        opened = self.open
        for name, _, _ in spans if opened else ():
            if name in opened and (other := opened[name]) is not request:
                full = other.full_blocks(self._size)
                if full > other.registered:
                    self._register(other, self._content.spans(other), full)

    def _register(self, table: BlockTable, spans: Sequence[Span], full: int) -> None:
        at = table.registered
        tail = table.runs[-1] if table.runs else None
        while tail is not None and tail.last < at:
            tail = tail.rest
        end = span = 0
        node: Node | None = None
        while at < full:
            name, begin, _ = spans[span]
            node = self._node(node, (node, end, name, begin), spans, span)
            end, span = node.follow(spans, span)
            last = (end - self._ahead) // self._size
            if last > full:
                last = full
            if last > at:
                tail = self._add(table, node, tail, at, last)
                at = last
        table.registered = full

    def _node(self, parent: Node | None, branch: Branch, spans: Sequence[Span], span: int) -> Node:
        node = self._nodes.get(branch)
        if node is None:
            node = self._nodes[branch] = Node(self._group, parent, branch, spans, span)
            if parent is not None:
                parent.children += 1
        return node

    def _add(self, table: BlockTable, node: Node, tail: Run | None, first: int, last: int) -> Run | None:
        """Blocks of `table` hold what those of `node` do; the run that ends with them, `tail` where that could grow."""
        runs, blocks = node.runs, table.blocks
        while runs and first < last and first < runs[-1].last:  # others hold the same, or what comes after it
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
        """Cut `run` before block `at`; the end of it."""
        upper, node = run.split(at), run.node
        if node is not None:
            runs = node.spares if run in node.spares else node.runs
            runs.insert(runs.index(run) + 1, upper)
        return upper

    def evict(self, run: Run, count: int) -> list[int]:
        """The last `count` blocks of `run` are about to hold something else; their ids, the last first."""
        node, end = run.node, run.last
        ids = run.cut(count)
        if node is not None:
            found = not node.spares or run in node.runs
            if run.first == run.last:
                runs = node.runs if found else node.spares
                if runs[-1] is run:  # nearly always: what comes after it in a prefix was evicted before it
                    runs.pop()
                else:
                    runs.remove(run)
            if found and node.spares:
                self._promote(node, run.last, end)
            if not node.runs:
                self._prune(node)
            if self.observer is not None:
                for id in ids:
                    self.observer.removed(id)
        return ids

    def lose(self, run: Run) -> None:
        """`run` cannot be found any more."""
        node = run.node
        if node is not None:
            found = run in node.runs
            (node.runs if found else node.spares).remove(run)
            if found:
                self._promote(node, run.first, run.last)
            self._prune(node)
            run.node = None
            if self.observer is not None:
                for id in run.ids:
                    self.observer.removed(id)

    def _promote(self, node: Node, first: int, last: int) -> None:
        """Of the spares that hold these blocks, those registered first are found from now on."""
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
        """Forget nodes that hold nothing and lead to nothing."""
        while node is not None and not (node.runs or node.spares or node.children or node.lost):
            del self._nodes[node.branch]
            node.lost = True
            node = node.parent
            if node is not None:
                node.children -= 1

    def check(self, runs: Iterable[Run]) -> None:
        """Raise AssertionError unless the tree holds these `runs` and no other, each where it belongs."""
        nodes = list(self._nodes.values())
        held = [run for node in nodes for run in node.runs + node.spares]
        assert sorted(map(id, held)) == sorted(id(run) for run in runs)
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
    """Up to which block all are in `runs`, which are in order, from block `at` on."""
    for run in runs:
        if run.first <= at < run.last:
            at = run.last
    return at
