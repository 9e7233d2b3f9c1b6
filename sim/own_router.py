"""A user's own router, which is not trusted: if it fails to choose a replica, the user gets a one-line error.

The router gets copies of requests and read-only views of replicas, which show only what routers may know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, Literal, cast, overload

from serving.errors import UserError, shown
from serving.user_code.call_limit import Fault, limited
from serving.workload import WorkloadRequest, as_it_is, what_changed
from sim.replica import Replica
from sim.replica_set import ReplicaSet

SEEN = (
    "index", "outstanding_requests", "outstanding_tokens", "known_tokens", "queued_requests", "used_blocks",
    "kv_tokens",
)  # fmt: skip
"""What a router may read of a replica."""

Rule = Literal["choice", "requests", "calls", "time"]


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

    @overload
    def __getitem__(self, at: int) -> SeenReplica: ...
    @overload
    def __getitem__(self, at: slice) -> list[SeenReplica]: ...
    def __getitem__(self, at: int | slice) -> SeenReplica | list[SeenReplica]:
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
        given, came = copy(request), as_it_is(request)
        try:
            chosen = limited(self._choose, given, seen)
        except Fault as fault:
            raise self._breach(fault.rule, request, fault.what) from fault.__cause__
        if as_it_is(given) != came:
            raise self._breach("requests", request, f"it {what_changed(came, given)}")
        if (replica := seen._replica(chosen)) is not None:
            return replica
        what = "a replica" if isinstance(chosen, SeenReplica) else shown(chosen)
        what = f"choose() returned {what}, which is none of the {len(replicas)} replicas that it was given"
        raise self._breach("choice", request, what)

    def _breach(self, rule: str, request: WorkloadRequest, what: str) -> RouterBreach:
        return RouterBreach(cast(Rule, rule), self.name, f"request {request.id}: {what}")
