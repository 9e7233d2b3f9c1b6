"""The protocol of a router, which chooses a replica for each request, and the function that finds a router by name."""

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
    """A router, which chooses one of the ready replicas. There is always at least one.

    It can read the loads of replicas, which include all requests accepted so far. The constructor of a user's own class
    gets the `settings` of `fleet.router` as keyword arguments.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica: ...


def find_router(name: str, **settings: int | float | str | bool) -> Router:
    """Make the router `name`: a known name or `package.module:Class`. Raises UserError if it cannot be made."""
    router: Router = make("router", name, find("router", name, ROUTERS, ("choose",)), **settings)
    return router if name in ROUTERS else OwnRouter(name, router)
