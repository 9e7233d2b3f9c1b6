"""Routers, which choose a replica for each request, and the replicas that they may choose from.

A set of replicas is notified when a replica's load falls, but not when it rises. So the load that the set remembers for
a replica is a lower bound. To find the least loaded replica, it reads the loads of only the few replicas with the
smallest remembered loads. A choice takes about as long among a thousand replicas as among ten.

A user's own router is not trusted: it gets copies of requests and read-only views of replicas, which show only what
routers may know. If it fails to choose a replica, the user gets a one-line error.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Literal, Protocol, cast

from tokentwin.serving.errors import UserError, shown
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.serving.user_code.plugins import find, make
from tokentwin.serving.workload import WorkloadRequest, as_it_is, what_changed
from tokentwin.sim.replica import Replica

ROUTERS = {
    "round-robin": "tokentwin.sim.routers.round_robin:RoundRobin",
    "random": "tokentwin.sim.routers.at_random:AtRandom",
    "power-of-two": "tokentwin.sim.routers.power_of_two:PowerOfTwoChoices",
    "least-requests": "tokentwin.sim.routers.least:LeastOutstandingRequests",
    "least-tokens": "tokentwin.sim.routers.least:LeastOutstandingTokens",
    "kv-aware": "tokentwin.sim.routers.least:LeastKvUse",
    "predicted-latency": "tokentwin.sim.routers.predicted_latency:PredictedLatency",
    "prefix-affinity": "tokentwin.sim.routers.prefix_affinity:PrefixAffinity",
    "session-sticky": "tokentwin.sim.routers.session_sticky:SessionSticky",
    "adapter-affinity": "tokentwin.sim.routers.adapter_affinity:AdapterAffinity",
}
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

    def load_grew(self, replica: Replica) -> None:
        self.outstanding_requests += 1

    def load_shrank(self, replica: Replica) -> None:
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


SEEN = (
    "index", "outstanding_requests", "outstanding_tokens", "known_tokens", "queued_requests", "used_blocks",
    "kv_tokens",
)  # fmt: skip
"""What a router may read of a replica."""

Rule = Literal["choice", "requests", "calls"]


class RouterBreach(UserError):
    """The error of a router that broke `rule`; the message names the request and what the router did."""

    def __init__(self, rule: Rule, router: str, what: str) -> None:
        self.rule = rule
        super().__init__("router", router, what)


class SeenReplica:
    """A read-only view of a replica."""

    __slots__ = ("__replica",)

    def __init__(self, replica: Replica) -> None:
        object.__setattr__(self, "_SeenReplica__replica", replica)

    def __getattr__(self, name: str) -> Any:
        if name not in SEEN:
            raise AttributeError(f"a router may read {', '.join(SEEN)} of a replica, not {name}")
        return getattr(self.__replica, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a router may not write {name} of a replica")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"replica {self.index}"


class SeenReplicas(Sequence[SeenReplica]):
    """A read-only view of a `ReplicaSet`. The view of a replica stays one object while the replica is a member."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.__replicas = replicas
        self.__version = -1
        self.__views: list[SeenReplica] = []
        self.__by_index: dict[int, SeenReplica] = {}
        self.__members: dict[int, Replica] = {}  # keys are the object ids of the `SeenReplica`s
        self.__loads: dict[Callable[[Any], Any], Callable[[Replica], Any]] = {}

    def __len__(self) -> int:
        return len(self.__replicas)

    def __getitem__(self, at: Any) -> Any:
        return self.__all()[at]

    def __iter__(self) -> Iterator[SeenReplica]:
        return iter(self.__all())

    @property
    def outstanding_requests(self) -> int:
        return self.__replicas.outstanding_requests

    @property
    def version(self) -> int:
        return self.__replicas.version

    def least(self, load: Callable[[Any], Any]) -> SeenReplica:
        """Return the replica with the smallest `load`, as `ReplicaSet.least` does; `load` takes a `SeenReplica`."""
        self.__all()
        by_index = self.__by_index
        of_replica = self.__loads.get(load)
        if of_replica is None:
            of_replica = self.__loads[load] = lambda replica: load(by_index.get(replica.index) or SeenReplica(replica))
        return by_index[self.__replicas.least(of_replica).index]

    def __all(self) -> list[SeenReplica]:
        if self.__version != self.__replicas.version:
            self.__version = self.__replicas.version
            before, by_index = dict(self.__by_index), self.__by_index
            by_index.clear()
            by_index.update((one.index, before.get(one.index) or SeenReplica(one)) for one in self.__replicas)
            self.__views = list(by_index.values())
            self.__members = {id(by_index[one.index]): one for one in self.__replicas}
        return self.__views

    def _replica(self, chosen: object) -> Replica | None:
        """Return the member of which `chosen` is the view; None if there is none."""
        self.__all()
        return self.__members.get(id(chosen))


class OwnRouter:
    """A `Router` that calls a user's `router`; `name` is its name in errors."""

    def __init__(self, name: str, router: Any) -> None:
        self.name, self._choose = name, router.choose
        self._seen: dict[int, tuple[ReplicaSet, SeenReplicas]] = {}  # by object id of the set, which is kept alive

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        """Choose a replica. Raises `RouterBreach` that names the router and the request if the choice is not valid."""
        _, seen = self._seen.get(id(replicas)) or self._seen.setdefault(
            id(replicas), (replicas, SeenReplicas(replicas))
        )
        view = request.server_view()
        given, came = copy(view), as_it_is(view)
        try:
            chosen = limited(self._choose, given, seen)
        except Fault as fault:
            raise self._breach("calls", request, fault.what) from fault.__cause__
        if as_it_is(given) != came:
            raise self._breach("requests", request, f"it {what_changed(came, given)}")
        if (replica := seen._replica(chosen)) is not None:
            return replica
        what = "a replica" if isinstance(chosen, SeenReplica) else shown(chosen)
        what = f"choose() returned {what}, which is none of the {len(replicas)} replicas that it was given"
        raise self._breach("choice", request, what)

    def _breach(self, rule: str, request: WorkloadRequest, what: str) -> RouterBreach:
        return RouterBreach(cast(Rule, rule), self.name, f"request {request.id}: {what}")


class Router(Protocol):
    """A router, which chooses one of the ready replicas. There is always at least one.

    It can read the loads of replicas, which include all requests accepted so far. The constructor of a user's own class
    gets the `settings` of `fleet.router` as keyword arguments.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica: ...


def find_router(name: str, **settings: int | float | str | bool) -> Router:
    """Make the router `name`: a known name or `package.module:Class`. Raises UserError if it cannot be made."""
    router: Router = make("router", name, find("router", name, ROUTERS, ("choose",)), **settings)
    return router if name in ROUTERS else OwnRouter(name, router)
