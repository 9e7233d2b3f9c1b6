"""The `edf` policy: earliest deadline first, where the deadline is arrival plus the SLO class's TTFT bound.

On one server with jobs of equal length, this order meets all deadlines if any order does (Horn 1974). Under overload it
serves requests that are already late before requests that could still be in time.
"""

from __future__ import annotations

from tokentwin.serving.policies.ranked import RankedScheduler
from tokentwin.serving.request import Request


class EdfScheduler(RankedScheduler):
    """A scheduler that serves the earliest deadline first. Without TTFT bounds it serves first come, first served."""

    def score(self, request: Request) -> int:
        bounds_ms = self.config.edf_ttft_ms
        bound_ms = bounds_ms.get(request.arrived.slo_class, max(bounds_ms.values(), default=0.0))
        return request.arrived.arrival_ns + round(bound_ms * 1e6)
