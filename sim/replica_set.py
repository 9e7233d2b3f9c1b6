"""The replicas that a router may choose from, and the least loaded of them without looking at all.

The set does not notice when a load rises, but hears when it falls. So the load that it remembers of a replica is a
lower bound, and it finds the least loaded one by looking again at the few that were remembered as lightest: a request
costs about the same in a fleet of ten and of a thousand.
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
        outstanding_requests: requests queued and running on its members
        version: grows whenever a member comes or goes
    """

    def __init__(self) -> None:
        super().__init__()
        self.outstanding_requests = 0
        self.version = 0
        self._by_index: dict[int, Replica] = {}
        self._rankings: dict[Load, _Ranking] = {}

    def least(self, load: Load) -> Replica:
        """Return the member with the least `load`; the first among equals. Raises IndexError if there are no members.

        Nothing but the end of a request may lower the load of a replica. Pass the same function every time.
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
        """Remove `replica`, which takes no more."""
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
    """A heap of `(load, index)`, each at most the load its replica has now."""

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
                heappop(heap)  # the replica has left, or a lower value was noted since
                continue
            load = self._load(replica)
            if load == value:
                return replica
            noted[index] = load
            heapreplace(heap, (load, index))

    def note(self, replica: Replica) -> None:
        """Note that the load of `replica` may have fallen, or that it is new."""
        load, index = self._load(replica), replica.index
        if index in self._noted and load >= self._noted[index]:
            return
        self._noted[index] = load
        heappush(self._heap, (load, index))
        if len(self._heap) > 4 * len(self._noted) + 64:  # mostly superseded
            self._heap = [(noted, index) for index, noted in self._noted.items()]
            heapify(self._heap)


def _index(replica: Replica) -> int:
    return replica.index
