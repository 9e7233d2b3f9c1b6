"""Prefix affinity: requests with a common prefix go to one replica and its prefix cache, unless its load is too high.

The method is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): no replica gets more than
`load_bound` times the mean number of outstanding requests. A request that would exceed this bound goes to the next
replica on the ring.
"""

from __future__ import annotations

from math import ceil

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet
from tokentwin.sim.routers.hash_ring import HashRing
from tokentwin.sim.routers.least import outstanding_requests


class PrefixAffinity:
    """A router that hashes the segments and images of the first `prefix_tokens` tokens of a prompt, and its adapter.

    A private prompt goes to the replica with the fewest requests. If `prefix_tokens` is larger than the first prompt of
    a conversation, its second turn has another key than its first.
    """

    def __init__(self, prefix_tokens: int = 16, load_bound: float = 1.25) -> None:
        if prefix_tokens < 1:
            raise UserError("fleet.router.settings.prefix_tokens", prefix_tokens, "must be at least 1")
        if not load_bound > 1:
            raise UserError("fleet.router.settings.load_bound", load_bound, "must be above 1")
        self._prefix_tokens = prefix_tokens
        self._load_bound = load_bound
        self._ring = HashRing()

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        key = self._key(request)
        if not key:
            return replicas.least(outstanding_requests)
        most = ceil(self._load_bound * (replicas.outstanding_requests + 1) / len(replicas))
        return next(r for r in self._ring.successors(key, replicas) if r.outstanding_requests < most)

    def _key(self, request: WorkloadRequest) -> str:
        names = []
        left = self._prefix_tokens
        for name, tokens in request.content:
            if name == PRIVATE or left <= 0:
                break
            names.append(name)
            left -= tokens
        return "\n".join([request.adapter, *names] if names and request.adapter else names)
