"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving.errors import UserError
from serving.plugins import find
from serving.workload import WorkloadRequest
from sim.replica import Replica

ROUTERS = {
    "round-robin": "sim.router:RoundRobin",
    "least-tokens": "sim.router:LeastOutstandingTokens",
}


class Router(Protocol):
    """Chooses among replicas; sees everything they have accepted so far, running requests included."""

    def choose(self, request: WorkloadRequest, replicas: Sequence[Replica]) -> Replica: ...


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: WorkloadRequest, replicas: Sequence[Replica]) -> Replica:
        replica = replicas[self._next % len(replicas)]
        self._next += 1
        return replica


class LeastOutstandingTokens:
    """The replica with the fewest prompt and output tokens of unfinished requests; the first among equals.

    Queued and running requests both count: a router that counts only the queued ones sends a whole burst to
    one replica.
    """

    def choose(self, request: WorkloadRequest, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_outstanding)


def _outstanding(replica: Replica) -> int:
    return replica.outstanding_tokens


def find_router(name: str) -> Router:
    """A new router called `name`, or of the class at `package.module:Class`."""
    try:
        router: Router = find("router", name, ROUTERS, ("choose",))()
    except TypeError as error:
        raise UserError("router", name, f"cannot be made without arguments: {error}") from None
    return router
