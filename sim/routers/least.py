"""Routers that choose the least loaded replica, by one of three loads; among equals they choose the first.

Queued and running requests both count: a router that counts only the queued ones sends a whole burst to one replica.
"""

from __future__ import annotations

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet


class LeastOutstandingRequests:
    """A router that chooses the replica with the fewest unfinished requests."""

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(outstanding_requests)


class LeastOutstandingTokens:
    """A router that chooses the replica with the fewest tokens of unfinished requests.

    It counts prompt tokens plus the maximum number of output tokens. For a request without `max_tokens`, that number is
    the actual output length, which no real router knows.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(_outstanding_tokens)


class LeastKvUse:
    """A router that chooses the replica with the smallest share of KV memory in use.

    The prompts of queued requests count as in use.
    """

    def choose(self, request: WorkloadRequest, replicas: ReplicaSet) -> Replica:
        return replicas.least(_kv_use)


def outstanding_requests(replica: Replica) -> int:
    return replica.outstanding_requests


def _outstanding_tokens(replica: Replica) -> int:
    return replica.outstanding_tokens


def _kv_use(replica: Replica) -> float:
    return replica.known_tokens / replica.kv_tokens
