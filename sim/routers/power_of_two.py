"""Power of two choices: the less loaded of two random replicas is nearly as good as the least loaded of all.

The probability of a long queue falls doubly exponentially with its length, instead of geometrically (Mitzenmacher 2001;
Vvedenskaya et al. 1996).
"""

from __future__ import annotations

from random import Random

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet


class PowerOfTwoChoices:
    """A router that draws two replicas and takes the one with fewer outstanding requests, or the first if equal."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        count = len(replicas)
        first = self._random.randrange(count)
        if count == 1:
            return replicas[first]
        second = (first + 1 + self._random.randrange(count - 1)) % count
        if replicas[second].outstanding_requests < replicas[first].outstanding_requests:
            return replicas[second]
        return replicas[first]
