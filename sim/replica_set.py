"""The replicas that a router may choose from, with a fast search for the least loaded replica.

The set is told when a load falls, but not when it rises. So the load that it remembers for a replica is a lower bound.
To find the least loaded replica, it reads the loads of only the few replicas with the smallest remembered loads. A
choice takes about as long among a thousand replicas as among ten.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from sim.replica import Replica

Load = Callable[[Replica], Any]


class ReplicaSet(list[Replica]):
    """The replicas in order of their index. Only `join` and `leave` change the set.

    Attributes:
        outstanding_requests: number of requests queued and running on its members
        version: number that grows whenever a member joins or leaves
    """

    def __init__(self) -> None:
        super().__init__()
        self.outstanding_requests = 0
        self.version = 0
        self._by_index: dict[int, Replica] = {}
        self._rankings: dict[Load, _Ranking] = {}

    def least(self, load: Load) -> Replica:
        """Return the member with the smallest `load`; the first among equals. Raises IndexError if the set is empty.

        Only the end of a request may lower the load of a replica. Pass the same function object in every call.
        """
        ranking = self._rankings.get(load)
        if ranking is None:
            ranking = self._rankings[load] = _Ranking(load, self)
        return ranking.first(self._by_index)

    def join(self, replica: Replica) -> None:
        """Add `replica`, which takes requests from now on."""
        insort(self, replica, key=_index)
        self._by_index[replica.index] = replica
        self.outstanding_requests += replica.outstanding_requests
        self.version += 1
        for ranking in self._rankings.values():
            ranking.note(replica)
        replica.listeners.append(self)

    def leave(self, replica: Replica) -> None:
        """Remove `replica`, which takes no more requests."""
        self.remove(replica)
        del self._by_index[replica.index]
        self.outstanding_requests -= replica.outstanding_requests
        self.version += 1
        replica.listeners.remove(self)

    def loaded(self, replica: Replica) -> None:
        self.outstanding_requests += 1

    def lightened(self, replica: Replica) -> None:
        self.outstanding_requests -= 1
        for ranking in self._rankings.values():
            ranking.note(replica)


class _Ranking:
    """A heap of `(load, index)` of replicas. A noted load is at most the present load of its replica."""

    def __init__(self, load: Load, replicas: Iterable[Replica]) -> None:
        self._load = load
        self._noted = {replica.index: load(replica) for replica in replicas}
        self._heap = [(noted, index) for index, noted in self._noted.items()]
        heapify(self._heap)

    def first(self, by_index: dict[int, Replica]) -> Replica:
        heap, noted = self._heap, self._noted
        while True:
            value, index = heap[0]
            replica = by_index.get(index)
            if replica is None or value != noted[index]:
                heappop(heap)  # the replica has left, or a newer load was noted
                continue
            load = self._load(replica)
            if load == value:
                return replica
            noted[index] = load
            heapreplace(heap, (load, index))

    def note(self, replica: Replica) -> None:
        """Note the load of `replica`, because it may have fallen or the replica is new."""
        load, index = self._load(replica), replica.index
        if index in self._noted and load >= self._noted[index]:
            return
        self._noted[index] = load
        heappush(self._heap, (load, index))
        if len(self._heap) > 4 * len(self._noted) + 64:  # most entries are outdated
            self._heap = [(noted, index) for index, noted in self._noted.items()]
            heapify(self._heap)


def _index(replica: Replica) -> int:
    return replica.index
