"""Undoing quantised timestamps: arrivals that share a tick are spread evenly over it.

A trace rounded to ticks (Mooncake's are about 3 s) shows bursts that never were: 90 % of its gaps are zero. The
true times inside a tick are unknown; even spacing adds the least burstiness of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from serving.workload import Workload


def spread_ticks(workload: Workload) -> Workload:
    """`workload` with the n arrivals of a tick at its start + i/n of a tick, in their order.

    A tick is the median gap between distinct arrivals, or the gap to the next one if that is shorter. A
    workload with no two arrivals alike comes back as it is.
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
