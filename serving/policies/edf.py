"""The `edf` policy: earliest deadline first, where the deadline is arrival plus the SLO class's TTFT bound.

On one server, if any order meets every deadline of unit jobs, this one does (Horn 1974). Under overload it serves
requests that are late already before requests that could still be in time.
"""

from __future__ import annotations

from serving.policies.ranked import RankedScheduler
from serving.request import Request


class EdfScheduler(RankedScheduler):
    """A scheduler that serves the smallest deadline first. Without bounds it serves first come, first served."""

    def score(self, request: Request) -> int:
        bounds_ms = self.config.edf_ttft_ms
        bound_ms = bounds_ms.get(request.arrived.slo_class, max(bounds_ms.values(), default=0.0))
        return request.arrived.arrival_ns + round(bound_ms * 1e6)
