"""The `priority-ageing` policy: by priority, but waiting makes up for it, so that no request starves.

A request's urgency is its priority less one step for every `ageing_s` seconds of waiting. All waiting requests age at
the same rate, so the present time cancels out of every comparison: the rest is a rank fixed at arrival, and the policy
needs no clock. A request lets another pass only if that one is d > 0 steps more urgent and arrives at most d *
`ageing_s` seconds later.
"""

from __future__ import annotations

from serving.policies.ranked import RankedScheduler
from serving.request import Request


class PriorityAgeingScheduler(RankedScheduler):
    """A scheduler with the smallest arrival plus priority * `ageing_s` first; at 0, first come, first served."""

    def score(self, request: Request) -> int:
        return request.arrived.arrival_ns + request.priority * round(self.config.ageing_s * 1e9)
