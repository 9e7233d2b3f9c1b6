"""Data-parallel ranks that share a mixture's experts: each has a scheduler of its own, and all step together.

Every layer brings the tokens of all ranks to their experts and back. So a step takes as long as the step of the rank
with the most to do, and none begins before all ranks with work have planned it. A rank without work takes part all the
same (vLLM runs a dummy batch), so requests that reach it while a step is under way wait for the next. Over pipeline
stages each stage does so: the ranks' steps enter the first together, and each stage takes as long as its slowest rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from serving.contract import Contract
from serving.cost_model import CostModel
from serving.deployments.config import Deployment
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError
from serving.request import Request
from serving.step_plan import StepPlan
from sim.clock import PLANNING, STEP_ENDS, Alarm, VirtualClock
from sim.pipeline import Passage, Stages
from sim.replica import Replica
from sim.run_log import RunLog

_BEFORE_STEPS_END, _AFTER_PLANNING = STEP_ENDS - 1, PLANNING + 1
_NOT_KNOWN = 1 << 62  # end of a step that has not begun


def steps_together(deployment: Deployment) -> bool:
    """Return whether the ranks of `deployment` step together. Ranks of a dense model share nothing."""
    if deployment.data_parallel_size == 1:
        return False
    try:
        return find_model(deployment.model).num_experts > 0
    except UserError:  # a model that only the real engine knows, which has no ranks
        return False


class Lockstep:
    """The `ranks` of one engine.

    Attributes:
        until_ns: no step can begin before: until then the first stage is at work, or no more steps may be in flight
        alarm: begin of the next step, as far as is known; None before any rank has planned it
    """

    def __init__(self, clock: VirtualClock, ranks: int, stages: int, overlaps: bool) -> None:
        self.until_ns = 0
        self.alarm: Alarm | None = None
        self.left = ranks  # ranks that are still to be made
        self._ranks = ranks
        self._clock = clock
        self._stages = Stages(stages)
        most = stages + (overlaps and stages > 1)
        self._ends_ns = deque([0] * most, most)  # ends of the last steps
        self._ready: list[Rank] = []
        self._ready_ns = 0

    def ready(self, rank: Rank, ready_ns: int) -> None:
        """Take `rank`'s part of the next step, which it has planned and can begin at `ready_ns`."""
        self._ready.append(rank)
        self._ready_ns = max(self._ready_ns, ready_ns)
        begins_ns, now = max(self._ready_ns, self.until_ns), self._clock.now_ns
        # All ranks have planned it by then in the overlapped loop; in the plain loop some do when the step before ends.
        # Over stages a rank with all its steps in flight does, too.
        overlapped = rank.overlaps and len(self._ends_ns) == 1
        order = _BEFORE_STEPS_END if overlapped and begins_ns > now else _AFTER_PLANNING
        self.alarm = Alarm(self._clock, begins_ns, order, self._begin)

    def _begin(self, alarm: Alarm) -> None:
        if alarm is not self.alarm:
            return
        ready, now = self._ready, self._clock.now_ns
        self._ready, self._ready_ns, self.alarm = [], 0, None
        tokens = -(-sum(rank.planned.tokens for rank in ready) // self._ranks)
        times_ns = zip(*(rank.times_ns(tokens) for rank in ready), strict=True)
        stages_ns, transfers_ns = ([max(of_ranks) for of_ranks in zip(*each, strict=True)] for each in times_ns)
        passage = self._stages.passed(now, stages_ns, transfers_ns)
        self._ends_ns.append(passage.end_ns)
        self.until_ns = max(self._stages.free_ns[0], self._ends_ns[0])
        for rank in ready:
            rank.begin(passage)


class Rank(Replica):
    """One of the ranks of a `Lockstep`. Its last launched step may not have begun."""

    def __init__(
        self,
        group: Lockstep,
        clock: VirtualClock,
        index: int,
        policy: Contract,
        cost: CostModel,
        log: RunLog,
        on_end: Callable[[Request], None],
        stages: int,
    ) -> None:
        super().__init__(clock, index, policy, cost, log, on_end, stages)
        self._leaps = False
        self._group = group
        self._planned_ns = 0
        group.left -= 1

    @property
    def overlaps(self) -> bool:
        """True if the rank plans a step while the one before runs."""
        return self._depth > 1

    @property
    def planned(self) -> StepPlan:
        """The rank's part of the step that has not begun."""
        return self._launched[-1][0]

    def times_ns(self, routed_tokens: int) -> tuple[list[int], list[int]]:
        """Return how long that part takes on each stage, and on its way to each but the first.

        Each rank has `routed_tokens` tokens on average.
        """
        self.planned.routed_tokens = routed_tokens
        if self._pipeline is not None:
            return self._pipeline.times_ns(self.planned)
        step_ns = self._cost.step_ns(self.planned)
        waits_ns = 0 if self.network is None else self.network.wait_ns(self.planned.tokens, step_ns)
        return [step_ns + waits_ns], []

    def begin(self, passage: Passage) -> None:
        """Begin the step now; it passes the stages as all ranks' steps do."""
        start_ns, end_ns, stages_ns = passage
        plan, _ = self._launched.pop()
        self._launched.append((plan, end_ns))
        self._last_end_ns = end_ns
        if self._pipeline is not None:
            self._pipeline.sampled(end_ns if plan.sampled_rows else 0)
        plan.admitted = tuple(request for request in plan.admitted if not request.ended)
        worked_ns = None if self._pipeline is None else stages_ns
        self._log.planned(self.index, self.scheduler, plan, self._planned_ns, start_ns, end_ns, worked_ns)
        if self.on_planned is not None:
            self.on_planned(plan, end_ns)
        self._launch_steps(start_ns)

    def _launch_steps(self, now: int) -> None:
        launched, group = self._launched, self._group
        if not launched and not self.overlaps and group.until_ns > now:
            self._set(group.until_ns, PLANNING, self._plan)  # the rank takes part in a step without work of its own
            return
        while self._may_plan() and not (launched and launched[-1][1] == _NOT_KNOWN):
            if (plan := self._next_plan(now)) is None:
                break
            if not plan.tokens:
                self._queue_idle(plan, now)
                continue
            launched.append((plan, _NOT_KNOWN))
            self._planned_ns = now
            group.ready(self, max(now + self._cost.cpu_ns(plan), self._tokens_ns))
        if not launched:
            self._rest()
        elif launched[0][1] == _NOT_KNOWN:
            self._alarm = group.alarm
        else:
            self._set(max(launched[0][1], now), STEP_ENDS + self.index, self._commit)
