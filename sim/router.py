"""The protocol of a router, which chooses a replica for each request, and the search for one by name."""

from __future__ import annotations

from typing import Protocol

from serving.user_code.plugins import find, make
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
    """A router, which chooses among the replicas that are ready, of which there is at least one.

    It sees everything that they have accepted so far, running requests included. A user's own class may take keyword
    arguments: the `settings` of `fleet.router`.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica: ...


def find_router(name: str, **settings: int | float | str | bool) -> Router:
    """Return a new router called `name`, or of `package.module:Class`. Raises UserError if it cannot be made."""
    router: Router = make("router", name, find("router", name, ROUTERS, ("choose",)), **settings)
    return router if name in ROUTERS else OwnRouter(name, router)
