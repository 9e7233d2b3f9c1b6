"""Changing a workload without changing what is in it: fewer requests, or the same at another rate."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from serving.workload import Workload


def reshaped(workload: Workload, *, limit: int | None = None, rate_scale: float | None = None) -> Workload:
    """The first `limit` requests of `workload`, arriving `rate_scale` times as fast."""
    requests = workload.requests if limit is None else list(islice(workload.requests, limit))
    if rate_scale is not None:
        requests = [replace(request, arrival_ns=round(request.arrival_ns / rate_scale)) for request in requests]
    return replace(workload, requests=requests)
