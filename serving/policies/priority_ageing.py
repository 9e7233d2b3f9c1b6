"""The `priority-ageing` policy: priority order, but requests become more urgent as they wait, so that none starves.

The priority number of a request falls by one for every `ageing_s` seconds of waiting; smaller numbers are more urgent.
All waiting requests age at the same rate, so the present time cancels out of every comparison. What remains is a rank
that is fixed at arrival, and the policy needs no clock. A later request passes an earlier one only if its priority
number is smaller by d > 0 and it arrives at most d * `ageing_s` seconds later.
"""

from __future__ import annotations

from tokentwin.serving.policies.ranked import RankedScheduler
from tokentwin.serving.request import Request


class PriorityAgeingScheduler(RankedScheduler):
    """A scheduler with the smallest value of arrival + priority * `ageing_s` first; `ageing_s` 0 is arrival order."""

    def score(self, request: Request) -> int:
        return request.arrived.arrival_ns + request.priority * round(self.config.ageing_s * 1e9)
