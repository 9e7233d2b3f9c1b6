"""The traffic of a plan as a page may ask for it: no more than can be planned for in an hour, and at a glance."""

from __future__ import annotations

from planning.plan.request import PlanRequest
from serving.errors import UserError
from serving.workload import Workload

# Of one plan: every one is simulated on each fleet that is tried, some twenty times in all, in what is then an hour.
MOST_REQUESTS = 100_000


def check_few_enough(request: PlanRequest) -> None:
    """Raises UserError when there are too many requests, of a specification before any is made."""
    requests, remedy = request.expected_requests, "lower the rate, or simulate fewer minutes"
    if requests is None:
        requests, remedy = len(list(request.workload().requests)), "take a shorter stretch of the trace"
    if requests > MOST_REQUESTS:
        allowed = f"are too many to plan for; {MOST_REQUESTS:,} are allowed: {remedy}"
        raise UserError("traffic", f"{requests:,.0f} requests", allowed)


def glance(request: PlanRequest, most: int) -> Workload:
    """The first of the requests, up to `most` of a specification; those of a trace are there already, all of them.

    Raises UserError as `check_few_enough` and the readers do.
    """
    check_few_enough(request)
    if (request.expected_requests or 0) > most:
        request = request.model_copy(update={"limit": most})
    return request.workload(at_named_rate=True)
