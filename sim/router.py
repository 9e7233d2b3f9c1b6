"""Which replica a request goes to."""

from __future__ import annotations

from typing import Protocol

from serving.plugins import find, make
from serving.workload import WorkloadRequest
from sim.own_router import OwnRouter
from sim.replica import Replica
from sim.replica_set import ReplicaSet

ROUTERS = {
    "round-robin": "sim.routers.round_robin:RoundRobin",
    "random": "sim.routers.at_random:AtRandom",
    "power-of-two": "sim.routers.power_of_two:PowerOfTwoChoices",
    "least-requests": "sim.routers.least:LeastOutstandingRequests",
    "least-tokens": "sim.routers.least:LeastOutstandingTokens",
    "kv-aware": "sim.routers.least:LeastKvUse",
    "prefix-affinity": "sim.routers.prefix_affinity:PrefixAffinity",
    "session-sticky": "sim.routers.session_sticky:SessionSticky",
}


class Router(Protocol):
    """Chooses among the replicas that are ready, of which there is at least one.

    It sees everything they have accepted so far, running requests included. A class of one's own may take keyword
    arguments: the `settings` of `fleet.router`.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica: ...


def find_router(name: str, **settings: int | float | str | bool) -> Router:
    """A new router called `name`, or of the class at `package.module:Class`. Raises UserError if it cannot be made."""
    router: Router = make("router", name, find("router", name, ROUTERS, ("choose",)), **settings)
    return router if name in ROUTERS else OwnRouter(name, router)
