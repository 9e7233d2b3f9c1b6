"""The `edf` policy: earliest deadline first, where the deadline is arrival plus the SLO class's TTFT bound.

On one server, if any order meets every deadline of unit jobs, this one does (Horn 1974). Under overload it serves those
that are late already before those that could still be in time.
"""

from __future__ import annotations

from serving.policies.ranked import RankedScheduler
from serving.request import Request


class EdfScheduler(RankedScheduler):
    """Smallest deadline first. Without bounds that is first come, first served."""

    def score(self, request: Request) -> int:
        bounds_ms = self.config.edf_ttft_ms
        bound_ms = bounds_ms.get(request.arrived.slo_class, max(bounds_ms.values(), default=0.0))
        return request.arrived.arrival_ns + round(bound_ms * 1e6)
