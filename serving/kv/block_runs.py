"""Runs of consecutive KV blocks of a sequence, the tree nodes that hold them, and the queue of free runs.

A node is the part of a sequence that no earlier sequence had, from its first new token on. Later sequences share the
node until they differ from it, at the end of a segment or within one; from there they have their own nodes. A block
belongs to the node of its last token.

The order of the queue decides which blocks are evicted, and equals that of vLLM for every block. The blocks of a freed
request are appended in reverse order, and blocks are taken from the head. So a run is in the queue with its last block
first, and is evicted from its end; what remains of a run is always a part of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokentwin.serving.workload import Name, Span

# The place where a node begins: its parent node, the position of the token, and name and begin of the span there
Branch = tuple["Node | None", int, Name, int]

_NO_END = 1 << 62


class Node:
    """The rest of a sequence from the token at which it differs from its `parent`.

    Attributes:
        group: index of the group of layers that the blocks belong to
        parent: node from which this one branches off; None for a first node
        branch: place where this node begins
        spans: spans of the sequence from `branch` on; the last one has no end
        children: number of nodes that branch off from this one
        lost: True if the node was removed from the tree, because it had no runs and no children
        runs: runs that can be found here, in order of their first blocks
        spares: runs with the content of runs in `runs` that were registered later, in order of registration
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
        """Compare a sequence with this node, from span number `number` of the sequence on.

        Returns the position of the token at which they differ, and the number of the sequence's span there.
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
    """Blocks `first` to `last - 1` of the sequences through `node`. Requests hold either all of them or none.

    Attributes:
        ids: physical ids of the blocks; empty if blocks have no identities
        node: node at which the run can be found; None if it cannot be found
        references: number of requests that hold the run
        awaited: number of sessions that held the run in their last turn and are expected to return; always 0 if
            sessions do not matter for eviction
        rest: run that was last split off the end of this run; requests that held this run at that time hold both
        before, after: neighbours in the free queue; None if the run is not in the queue
    """

    __slots__ = ("after", "awaited", "before", "first", "ids", "last", "node", "references", "rest")

    def __init__(self, node: Node | None, first: int, last: int, ids: list[int]) -> None:
        self.node = node
        self.first = first
        self.last = last
        self.ids = ids
        self.references = 1
        self.awaited = 0
        self.rest: Run | None = None
        self.before: Run | None = None
        self.after: Run | None = None

    def split(self, at: int) -> Run:
        """Cut the run before block `at`, and return the part after the cut, which comes first in the queue."""
        upper = Run(self.node, at, self.last, self.ids[at - self.first :])
        upper.references = self.references
        upper.awaited = self.awaited
        del self.ids[at - self.first :]
        self.last = at
        upper.rest, self.rest = self.rest, upper
        if self.before is not None:
            upper.before, upper.after = self.before, self
            self.before.after = self.before = upper
        return upper

    def cut(self, count: int) -> list[int]:
        """Remove the last `count` blocks of the run, and return their ids, from the last to the first."""
        self.last -= count
        if not self.ids:
            return []
        ids = self.ids[: -count - 1 : -1]
        del self.ids[-count:]
        return ids


class BlockTable:
    """The blocks that a request holds in one group of layers.

    Attributes:
        blocks: physical ids of the blocks, if they have identities; 0 for blocks before a sliding window
        registered: number of leading blocks that the pool has registered or given back
        runs: runs of registered blocks; parts that were split off them since are found by `Run.rest`
    """

    __slots__ = ("blocks", "registered", "runs")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.registered = 0
        self.runs: list[Run] = []

    def held_runs(self) -> list[Run]:
        """Return the runs of the registered blocks that the table still holds, in order."""
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
        """The run that is evicted first. The queue must not be empty."""
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


class SessionQueue(FreeQueue):
    """Free runs with those of sessions that are expected to return behind all others, each part in LRU order."""

    def __init__(self) -> None:
        super().__init__()
        self._fence = Run(None, 0, 0, [])  # awaited runs are behind it
        super().append(self._fence)

    @property
    def head(self) -> Run:
        first = self._ring.after
        if first is self._fence:
            first = first.after
        assert first is not None and first is not self._ring
        return first

    @property
    def tail(self) -> Run | None:
        """The last run before those that are awaited; None if there is none."""
        last = self._fence.before
        return None if last is self._ring else last

    def append(self, run: Run) -> None:
        if run.awaited:
            super().append(run)
            return
        before, fence = self._fence.before, self._fence
        assert before is not None
        run.before, run.after = before, fence
        before.after = fence.before = run

    def runs(self) -> list[Run]:
        return [run for run in super().runs() if run is not self._fence]
