"""The end of a step, as metrics are told of it."""

from __future__ import annotations

from apiserver.messages import Admitted, StepEnd
from serving.request import Status
from serving.scheduler import Scheduler
from serving.step_plan import StepPlan


def step_end(
    replica: int, scheduler: Scheduler, plan: StepPlan, now_ns: int, sampled: list[int], generated: int
) -> StepEnd:
    """Of `plan`, which `scheduler` has committed."""
    pool = scheduler.pool
    return StepEnd(
        replica,
        now_ns,
        len(scheduler.running),
        len(scheduler.waiting),
        sum(request.status is Status.LOADING for request in scheduler.waiting),
        (pool.total - pool.free) / pool.total,
        plan.tokens,
        generated,
        sampled,
        [Admitted(one.id, one.prompt_len, one.first_hit or 0, one.preemptions) for one in plan.admitted],
        plan.verified,
    )
