"""Adapter affinity: requests with one LoRA adapter go to one replica, unless its load is too high.

So a replica loads few adapters, and few requests wait for a slot. The hashing is that of `prefix-affinity`.
"""

from __future__ import annotations

from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.routers.prefix_affinity import PrefixAffinity


class AdapterAffinity(PrefixAffinity):
    """A router that hashes the adapter; a request without one goes to the replica with the fewest requests."""

    def __init__(self, load_bound: float = 1.25) -> None:
        super().__init__(load_bound=load_bound)

    def _key(self, request: WorkloadRequest) -> str:
        return request.adapter
