"""Changing a workload without changing what is in it: fewer requests, or the same at another rate."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice

from serving.errors import UserError
from serving.workload import Workload
from traces.arrivals import LATEST_NS


def reshaped(workload: Workload, *, limit: int | None = None, rate_scale: float | None = None) -> Workload:
    """The first `limit` requests of `workload`, arriving `rate_scale` times as fast.

    Raises UserError if that moves an arrival beyond what a time in nanoseconds can hold.
    """
    requests = workload.requests if limit is None else list(islice(workload.requests, min(limit, sys.maxsize)))
    if rate_scale is not None:
        last = max((request.arrival_ns for request in requests), default=0)
        if not last / rate_scale < LATEST_NS:
            raise UserError("rate-scale", rate_scale, "makes the trace last longer than 146 years; raise it")
        requests = [replace(request, arrival_ns=round(request.arrival_ns / rate_scale)) for request in requests]
    return replace(workload, requests=requests)


def at_rate(workload: Workload, rate: float) -> Workload:
    """`workload`, its requests in a list, with a mean gap between arrivals of 1 / `rate` seconds.

    Requests of one instant stay as they are. Raises UserError as `reshaped` does.
    """
    requests = list(workload.requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9 if requests else 0.0
    listed = replace(workload, requests=requests)
    return reshaped(listed, rate_scale=rate * span_s / (len(requests) - 1)) if span_s else listed
