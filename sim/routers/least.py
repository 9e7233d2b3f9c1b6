"""The least loaded replica, by one of three loads; the first among equals.

Queued and running requests both count: a router that counts only the queued ones sends a whole burst to one replica.
"""

from __future__ import annotations

from serving.workload import WorkloadRequest
from sim.replica import Replica
from sim.replica_set import ReplicaSet


class LeastOutstandingRequests:
    """A router that chooses the fewest unfinished requests."""

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(outstanding_requests)


class LeastOutstandingTokens:
    """A router that chooses the fewest prompt and output tokens of unfinished requests.

    It knows output lengths, as no real router does.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(_outstanding_tokens)


class LeastKvUse:
    """A router that chooses the smallest share of KV blocks that its requests fill so far or, queued, will fill."""

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(_kv_use)


def outstanding_requests(replica: Replica) -> int:
    return replica.outstanding_requests


def _outstanding_tokens(replica: Replica) -> int:
    return replica.outstanding_tokens


def _kv_use(replica: Replica) -> float:
    return replica.known_tokens / replica.kv_tokens
