"""Changes of a workload's arrival times or number of requests, which keep the content of the requests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, pairwise

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.distributions import LATEST_NS


def reshaped(
    workload: Workload,
    *,
    limit: int | None = None,
    rate_scale: float | None = None,
    warm_up_s: float | None = None,
) -> Workload:
    """Return the first `limit` requests of `workload` at `rate_scale` times their rate, counted after `warm_up_s`.

    Raises UserError if an arrival would be later than 146 years, or if all arrivals are in the warm-up.
    """
    requests = workload.requests if limit is None else list(islice(workload.requests, min(limit, sys.maxsize)))
    if rate_scale is not None:
        if workload.until_ns is not None:
            raise UserError("rate-scale", rate_scale, "needs a rate, but these users wait; change their number instead")
        last = max((request.arrival_ns for request in requests), default=0)
        if not last / rate_scale < LATEST_NS:
            raise UserError("rate-scale", rate_scale, "makes the trace last longer than 146 years; raise it")
        requests = [replace(request, arrival_ns=round(request.arrival_ns / rate_scale)) for request in requests]
    if warm_up_s is None:
        return replace(workload, requests=requests)
    warm_up_ns = round(warm_up_s * 1e9)
    by_the_clock = workload.concurrency is None
    if by_the_clock and not any(request.arrival_ns >= warm_up_ns for request in requests):
        raise UserError("warm-up", warm_up_s, "ends after the last arrival; shorten it, or take a longer trace")
    return replace(workload, requests=requests, warm_up_ns=warm_up_ns)


def only(workload: Workload, requests: Iterable[WorkloadRequest]) -> Workload:
    """Return `workload` with only the given requests, in their order.

    The turns of each session are numbered again. The first remaining turn of a session does not wait for an answer, but
    arrives at its arrival time.
    """
    turns: Counter[str] = Counter()
    kept = []
    for request in requests:
        if request.session:
            turn = turns[request.session]
            turns[request.session] += 1
            if turn != request.turn:
                request = replace(request, turn=turn, think_ns=request.think_ns if turn else None)
        kept.append(request)
    return replace(workload, requests=kept)


def at_rate(workload: Workload, rate: float) -> Workload:
    """Return `workload`, with its requests in a list, scaled to a mean gap between arrivals of 1 / `rate` seconds.

    If all requests arrive at one time, they are unchanged. Raises UserError as `reshaped` does.
    """
    requests = list(workload.requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9 if requests else 0.0
    listed = replace(workload, requests=requests)
    return reshaped(listed, rate_scale=rate * span_s / (len(requests) - 1)) if span_s else listed


def spread_ticks(workload: Workload) -> Workload:
    """Return `workload` with the n arrivals of each tick spread evenly over the tick, in their order.

    This undoes the quantisation of times. A trace whose times were rounded to ticks (about 3 s in Mooncake's traces)
    has bursts that did not exist: 90 % of its gaps are zero. The true times within a tick are unknown, and even spacing
    adds the smallest burstiness.

    A tick is the median gap between distinct arrivals, or the gap to the next arrival if that is shorter. A workload
    without equal arrivals is returned unchanged.
    """
    requests = list(workload.requests)
    counts = Counter(request.arrival_ns for request in requests)
    starts = sorted(counts)
    if len(starts) in (1, len(requests)):
        return workload
    gaps = [after - before for before, after in pairwise(starts)]
    tick = sorted(gaps)[len(gaps) // 2]
    width = dict(zip(starts, [min(gap, tick) for gap in gaps] + [tick], strict=True))
    placed: Counter[int] = Counter()
    spread = []
    for request in requests:
        start = request.arrival_ns
        offset = placed[start] * width[start] // counts[start]
        placed[start] += 1
        spread.append(replace(request, arrival_ns=start + offset))
    return replace(workload, requests=spread)
