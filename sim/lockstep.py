"""Data-parallel ranks that share the experts of an MoE model. Each rank has its own scheduler; all step together.

Every layer sends the tokens of all ranks to their experts and back. So a step takes as long as the slowest rank needs,
and begins only when all ranks with work have planned it. A rank without work takes part, too (vLLM runs a dummy batch),
so requests that reach it during a step wait for the next step. With pipeline stages, the ranks' steps enter the first
stage together, and each stage takes as long as its slowest rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tokentwin.serving.contract import Contract
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.sim.clock import PLANNING, STEP_ENDS, Alarm, VirtualClock
from tokentwin.sim.pipeline import Passage, Stages
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog

_BEFORE_STEPS_END, _AFTER_PLANNING = STEP_ENDS - 1, PLANNING + 1
_NOT_KNOWN = 1 << 62  # end of a step that has not begun


def steps_together(deployment: Deployment) -> bool:
    """Return whether the ranks of `deployment` step together. Ranks of a dense model are independent."""
    if deployment.data_parallel_size == 1:
        return False
    try:
        return find_model(deployment.model).num_experts > 0
    except UserError:  # a model that only the real engine knows; the real engine has no data-parallel ranks
        return False


class Lockstep:
    """The `ranks` data-parallel ranks of one engine.

    Attributes:
        until_ns: earliest time of the next step: the first stage is free then, and another step may be in flight
        alarm: alarm at the presently known begin of the next step; None if no rank has planned it
        left: number of ranks that are still to be made
    """

    def __init__(self, clock: VirtualClock, ranks: int, stages: int, overlaps: bool) -> None:
        self.until_ns = 0
        self.alarm: Alarm | None = None
        self.left = ranks  # ranks that are still to be made
        self._ranks = ranks
        self._clock = clock
        self._stages = Stages(stages)
        most = stages + (overlaps and stages > 1)
        self._ends_ns = deque([0] * most, most)  # end times of the last steps
        self._ready: list[Rank] = []
        self._ready_ns = 0

    def ready(self, rank: Rank, ready_ns: int) -> None:
        """Record that `rank` has planned its part of the next step, which can begin at `ready_ns`."""
        self._ready.append(rank)
        self._ready_ns = max(self._ready_ns, ready_ns)
        begins_ns, now = max(self._ready_ns, self.until_ns), self._clock.now_ns
        # In the overlapped loop, all ranks have planned the step before it begins. In the plain loop, some plan it when
        # the previous step ends. With pipeline stages, a rank with its maximum number of steps in flight also plans
        # only when a step ends.
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
        stages_ns, transfers_ns = ([max(ranks_ns) for ranks_ns in zip(*part_ns, strict=True)] for part_ns in times_ns)
        passage = self._stages.passed(now, stages_ns, transfers_ns)
        self._ends_ns.append(passage.end_ns)
        self.until_ns = max(self._stages.free_ns[0], self._ends_ns[0])
        for rank in ready:
            rank.begin(passage)


class Rank(Replica):
    """One rank of a `Lockstep`. The step that it launched last may not have begun."""

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
        """True if the rank plans a step while the previous step runs."""
        return self._depth > 1

    @property
    def planned(self) -> StepPlan:
        """The rank's part of the step that is launched and has not begun."""
        return self._launched[-1][0]

    def times_ns(self, routed_tokens: int) -> tuple[list[int], list[int]]:
        """Return the times of `planned` on each stage, and its transfer times to each stage but the first.

        `routed_tokens` is the mean number of tokens over the ranks.
        """
        self.planned.routed_tokens = routed_tokens
        if self._pipeline is not None:
            return self._pipeline.times_ns(self.planned)
        step_ns = self._cost.step_ns(self.planned)
        waits_ns = 0 if self.network is None else self.network.wait_ns(self.planned.tokens, step_ns)
        return [step_ns + waits_ns], []

    def begin(self, passage: Passage) -> None:
        """Begin the step now. `passage` is common to the steps of all ranks."""
        start_ns, end_ns, stages_ns = passage
        plan, _ = self._launched.pop()
        self._launched.append((plan, end_ns))
        self._last_end_ns = end_ns
        if self._pipeline is not None:
            self._pipeline.sampled(end_ns if plan.sampled_rows else 0)
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
