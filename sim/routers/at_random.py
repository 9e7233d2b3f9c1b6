"""The `random` router: it chooses a random replica, as a load balancer without state does."""

from __future__ import annotations

from random import Random

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet


class AtRandom:
    """A router that chooses every replica with the same probability."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas[self._random.randrange(len(replicas))]
