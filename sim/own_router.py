"""A user's own router, which is trusted in nothing: what it does instead of choosing a replica becomes one line."""

from __future__ import annotations

from typing import Any

from serving.call_limit import CallWatch, Fault
from serving.errors import UserError
from serving.workload import WorkloadRequest
from sim.replica import Replica
from sim.replica_set import ReplicaSet


class OwnRouter:
    """`Router` by a user's `router`, called `name`.

    watch   ends calls that take too long; whoever runs the router sets it
    """

    watch = CallWatch(needed=False)

    def __init__(self, name: str, router: Any) -> None:
        self._name, self._choose = name, router.choose

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        """Raises UserError that names the router and the request for anything but a choice."""
        try:
            chosen = self.watch.call(self._choose, request, replicas)
        except Fault as fault:
            raise UserError("router", self._name, f"request {request.id}: {fault.what}") from fault.__cause__
        if not any(chosen is replica for replica in replicas):
            what = f"replica {chosen.index}" if isinstance(chosen, Replica) else repr(chosen)
            what = f"choose() returned {what}, which is none of the {len(replicas)} replicas that it was given"
            raise UserError("router", self._name, f"request {request.id}: {what}")
        found: Replica = chosen
        return found
