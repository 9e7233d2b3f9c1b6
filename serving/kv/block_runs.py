"""Runs of consecutive KV blocks of a sequence, the nodes where they are found, and the queue of the free runs.

A node is the part of one sequence that no sequence before it had: all that follows its first new token. Other sequences
follow it until they part from it, at the end of a segment or within one, and have their own nodes from there. A block
belongs to the node of its last token.

The order of the queue decides what survives, and follows vLLM, block by block: a freed request's blocks go to the end
in reverse, and blocks are taken from the head. So a run stands in the queue with its last block foremost, and is
evicted from its end: the rest of it is always the beginning of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.workload import Name, Span

# The place of a parting: the parent node, the token, and the name and the begin of the span that goes on there
Branch = tuple["Node | None", int, Name, int]

_NO_END = 1 << 62


class Node:
    """A sequence from the token at which it parts from its `parent`: `spans`, the last of which has no end.

    Attributes:
        group: the number of the group of layers whose blocks these are
        children: nodes that part from this one
        lost: whether it has been forgotten, since no block was found here or further on
        runs: blocks that are found here, by their first
        spares: runs with the same content as `runs`, which were registered later, in order of registration
    """

    __slots__ = ("branch", "children", "group", "lost", "parent", "runs", "spans", "spares")

    def __init__(self, group: int, parent: Node | None, branch: Branch, spans: Sequence[Span], at: int) -> None:
        self.group = group
        self.parent = parent
        self.branch = branch
        name, begin, _ = spans[-1]
        self.spans = [*spans[at:-1], (name, begin, _NO_END)]
        self.lost = False
        self.children = 0
        self.runs: list[Run] = []
        self.spares: list[Run] = []

    def follow(self, spans: Sequence[Span], number: int) -> tuple[int, int]:
        """Follow a sequence that goes on here with its span number `number`.

        Returns the token at which it parts from the node, and the number of its span there.
        """
        for own, begin, until in self.spans:
            name, _, end = spans[number]
            if name != own:
                return begin, number
            if end > until:
                return until, number
            number += 1
            if end < until or number == len(spans):
                return end, number
        return end, number


class Run:
    """Blocks `first` up to but not including `last` of the sequences through `node`, which are held all together.

    Attributes:
        ids: their physical ids, empty if blocks have none
        node: None if the run cannot be found
        references: requests that hold it
        rest: the run that was last split off its end; requests that held this run then hold that one, too
        before, after: its neighbours in the queue; None while it is not there
    """

    __slots__ = ("after", "before", "first", "ids", "last", "node", "references", "rest")

    def __init__(self, node: Node | None, first: int, last: int, ids: list[int]) -> None:
        self.node = node
        self.first = first
        self.last = last
        self.ids = ids
        self.references = 1
        self.rest: Run | None = None
        self.before: Run | None = None
        self.after: Run | None = None

    def split(self, at: int) -> Run:
        """Cut the run before block `at`, and return the part after the cut, which is foremost in the queue."""
        upper = Run(self.node, at, self.last, self.ids[at - self.first :])
        upper.references = self.references
        del self.ids[at - self.first :]
        self.last = at
        upper.rest, self.rest = self.rest, upper
        if self.before is not None:
            upper.before, upper.after = self.before, self
            self.before.after = self.before = upper
        return upper

    def cut(self, count: int) -> list[int]:
        """Shorten the run by its last `count` blocks, and return their ids, the last first."""
        self.last -= count
        if not self.ids:
            return []
        ids = self.ids[: -count - 1 : -1]
        del self.ids[-count:]
        return ids


class BlockTable:
    """The blocks that a request holds in one group of layers.

    Attributes:
        blocks: their physical ids, if the pool keeps identities; 0 before a sliding window
        registered: how many of `blocks` the pool has registered, or given back, from the first on
        runs: runs that it has registered, and the parts that were split off them since
    """

    __slots__ = ("blocks", "registered", "runs")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.registered = 0
        self.runs: list[Run] = []

    def held_runs(self) -> list[Run]:
        """Return the runs that hold the registered blocks, in order."""
        runs: list[Run] = []
        ends = [run.first for run in self.runs[1:]]
        for run, end in zip(self.runs, [*ends, self.registered], strict=False):
            runs.append(run)
            while run.last < end:
                assert run.rest is not None
                run = run.rest
                runs.append(run)
        return runs


class FreeQueue:
    """The free runs in the order in which they are evicted."""

    def __init__(self) -> None:
        self._ring = ring = Run(None, 0, 0, [])
        ring.before = ring.after = ring

    @property
    def head(self) -> Run:
        """The run that is evicted first. The queue is not empty."""
        assert self._ring.after is not None and self._ring.after is not self._ring
        return self._ring.after

    @property
    def tail(self) -> Run | None:
        """The run that is evicted last; None if the queue is empty."""
        return None if self._ring.before is self._ring else self._ring.before

    def append(self, run: Run) -> None:
        last, ring = self._ring.before, self._ring
        assert last is not None
        run.before, run.after = last, ring
        last.after = ring.before = run

    def remove(self, run: Run) -> None:
        before, after = run.before, run.after
        assert before is not None and after is not None
        before.after, after.before = after, before
        run.before = run.after = None

    def runs(self) -> list[Run]:
        """Return all free runs, in order."""
        runs, run = [], self._ring.after
        while run is not None and run is not self._ring:
            runs.append(run)
            run = run.after
        return runs
