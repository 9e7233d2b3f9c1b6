"""Round robin: replicas get exactly equal shares of the requests, whatever their load."""

from __future__ import annotations

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet


class RoundRobin:
    """A router that chooses each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        replica = replicas[self._next % len(replicas)]
        self._next += 1
        return replica
