"""One engine on the virtual clock: the shared scheduler in the plain or the overlapped loop.

The plain loop has one step in flight, the overlapped loop two: it plans step N+1 while step N runs, so that CPU time
is hidden. Either way a step costs one event. In the plain loop a run of pure decode steps that nothing
interrupts is taken in one leap; an arrival cuts the leap at the end of the step then running.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from serving.cost_model import CostModel
from serving.request import Request, Status
from serving.scheduler import Scheduler
from serving.step_plan import StepPlan
from serving.workload import WorkloadRequest
from sim.clock import PLANNING, STEP_ENDS, Alarm, VirtualClock
from sim.run_log import RunLog


class Replica:
    """A scheduler, a cost model, and at most `depth` steps in flight.

    outstanding_tokens  prompt and output tokens of the requests it has and has not finished
    on_end              called with each request that finishes or is rejected
    """

    def __init__(
        self,
        clock: VirtualClock,
        index: int,
        scheduler: Scheduler,
        cost: CostModel,
        log: RunLog,
        on_end: Callable[[Request], None],
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.outstanding_tokens = 0
        self.outstanding_requests = 0
        self._clock = clock
        self._cost = cost
        self._log = log
        self._on_end = on_end
        self._depth = 2 if scheduler.config.async_scheduling else 1
        self._leaps = self._depth == 1 and not log.keeps_steps
        self._launched: deque[tuple[StepPlan, int]] = deque()  # and when they end
        self._last_end_ns = 0  # when the last launched step ends
        self._alarm: Alarm | None = None  # the next thing this replica does
        self._leap_ends: list[int] = []  # ends of the steps of the leap under way

    def offer(self, arrived: WorkloadRequest, arrival_ns: int) -> None:
        """A request is routed here, now."""
        if self._leap_ends:
            self._cut_leap()
        request = self.scheduler.add(arrived)
        self._log.arrived(self.index, request, arrival_ns, self._clock.now_ns)
        if request.status is Status.REJECTED:
            self._log.ended(request, self._clock.now_ns)
            self._on_end(request)
            return
        self.outstanding_requests += 1
        self.outstanding_tokens += request.max_len
        if self._alarm is None:
            self._set(self._clock.now_ns, PLANNING, self._plan)

    # Planning and launching

    def _set(self, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self._alarm = Alarm(self._clock, at_ns, order, callback)

    def _plan(self, alarm: Alarm) -> None:
        if alarm is self._alarm:
            self._launch_steps(self._clock.now_ns)

    def _launch_steps(self, now: int) -> None:
        while len(self._launched) < self._depth:
            if self._leaps and (steps := self.scheduler.steady_steps()) > 1:
                self._leap(steps, now)
                return
            plan = self.scheduler.schedule()
            if not plan.tokens:
                if plan.preempted and not self._launched:
                    continue  # a plan that only preempted: the blocks are free now
                break
            cpu_ns = self._cost.cpu_ns(plan)
            start = max(now + cpu_ns, self._last_end_ns)
            self._last_end_ns = start + self._cost.step_ns(plan)
            self._launched.append((plan, self._last_end_ns))
            self._log.planned(self.index, self.scheduler, plan, now, start, self._last_end_ns)
            if cpu_ns:
                if len(self._launched) < self._depth:
                    self._set(now + cpu_ns, PLANNING, self._plan)
                    return
                now += cpu_ns
        if self._launched:
            self._set(max(self._launched[0][1], now), STEP_ENDS, self._commit)
        else:
            self._alarm = None

    def _commit(self, alarm: Alarm) -> None:
        plan, _ = self._launched.popleft()
        now = self._clock.now_ns
        finished = self.scheduler.commit(plan)
        self._log.committed(self.index, plan, now)
        for request in finished:
            self._end(request, now)
        self._plan_after_arrivals(now)

    def _plan_after_arrivals(self, now: int) -> None:
        """Plan now, unless something else is still to happen at this timestamp."""
        if self._clock.peek() > now:
            self._launch_steps(now)
        else:
            self._set(now, PLANNING, self._plan)

    def _end(self, request: Request, now: int) -> None:
        self.outstanding_requests -= 1
        self.outstanding_tokens -= request.max_len
        self._log.ended(request, now)
        self._on_end(request)

    # Leaps

    def _leap(self, steps: int, now: int) -> None:
        decodes = self.scheduler.decodes
        durations = self._cost.decode_run_ns(len(decodes.members), decodes.context, decodes.squares, steps)
        self._leap_ends = list(accumulate(durations, initial=now))[1:]
        self._set(self._leap_ends[-1], STEP_ENDS, self._land)

    def _cut_leap(self) -> None:
        """Something is about to arrive: the leap ends with the step that is running.

        If that is somebody's last, it is planned now: at its end the arrival would get into the plan.
        """
        ends = self._leap_ends
        running = bisect_left(ends, self._clock.now_ns)
        if running + 1 < len(ends):
            del ends[running + 1 :]
            self._set(ends[running], STEP_ENDS, self._land)
        elif len(ends) == self.scheduler.decodes.steps_to_exit():
            self.scheduler.skip(running)
            self._log.leapt(self.index, ends[:running])
            plan = self.scheduler.schedule()
            now, self._last_end_ns = self._clock.now_ns, ends[running]
            self._leap_ends = []
            self._launched.append((plan, self._last_end_ns))
            self._log.planned(self.index, self.scheduler, plan, now, now, self._last_end_ns)
            self._set(self._last_end_ns, STEP_ENDS, self._commit)

    def _land(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        finished = self.scheduler.skip(len(self._leap_ends))
        self._log.leapt(self.index, self._leap_ends)
        now = self._last_end_ns = self._leap_ends[-1]
        self._leap_ends = []
        for request in finished:
            self._end(request, now)
        self._plan_after_arrivals(now)
