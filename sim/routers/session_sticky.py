"""Session stickiness: all turns of a conversation go to one replica, whatever its load."""

from __future__ import annotations

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet
from tokentwin.sim.routers.hash_ring import HashRing
from tokentwin.sim.routers.least import outstanding_requests


class SessionSticky:
    """A router by consistent hashing of the session.

    A request without a session goes to the replica with the fewest requests.
    """

    def __init__(self) -> None:
        self._ring = HashRing()

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        if not request.session:
            return replicas.least(outstanding_requests)
        return next(self._ring.successors(request.session, replicas))
