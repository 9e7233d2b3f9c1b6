"""One engine on the virtual clock: the shared scheduler in the plain or overlapped loop, on one or several stages.

The plain loop keeps one step in flight for each pipeline stage. The overlapped loop keeps one more: it plans step N+1
while step N runs, which hides CPU time. With several stages, an empty plan of the overlapped loop also takes a place
among the steps in flight (vLLM's batch queue). A step takes one event. With one stage, many pure decode steps in a row
can be one leap. An event that interrupts a leap finds the replica in the state that single steps would have reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from typing import Protocol

from mypy_extensions import mypyc_attr
from simpy.events import ProcessGenerator

from tokentwin.serving.contract import Contract
from tokentwin.serving.cost_model import CostModel, paced
from tokentwin.serving.deployments.kv_layout import kv_tokens
from tokentwin.serving.kv.block_pool import BlockPool
from tokentwin.serving.kv.external import ExternalKv
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.step_prices import DecodeRun
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.adapter_slots import AdapterSlots
from tokentwin.sim.clock import ARRIVAL, PLANNING, STEP_ENDS, Alarm, VirtualClock
from tokentwin.sim.encoder import Encoder
from tokentwin.sim.leap import Leap
from tokentwin.sim.links import SharedNetwork
from tokentwin.sim.pipeline import Pipeline
from tokentwin.sim.run_log import RunLog


class LoadListener(Protocol):
    """A listener that is called when a replica gets a request (`load_grew`) or loses one (`load_shrank`)."""

    def load_grew(self, replica: Replica) -> None: ...
    def load_shrank(self, replica: Replica) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class Replica:
    """A scheduler, a cost model, and the steps in flight over `stages` pipeline stages.

    Attributes:
        outstanding_requests: number of requests that it has accepted and not finished, queued and running
        outstanding_tokens: prompt tokens of these requests plus their maximum numbers of output tokens
        listeners: objects that are called at each change of its load
        hands_on: function that returns, for each request that finishes, whether another replica continues it; None if
            there is none. A continued request has not ended, and its KV blocks are kept until `release`
        on_planned: function that is called with each launched plan and its end time; None if there is none
        network: network that its steps share with KV transfers; None if they share none
        adapters: LoRA adapters on its device and in its host memory; None if it serves none
        encoder: its encoder of images, videos and audio; None if it has none, or one that takes no time
        reserved_requests: waiting requests that have KV blocks here for a prompt that a prefill replica computes

    Args:
        on_end: function that is called with each request that finishes, or is rejected because it can never fit
    """

    def __init__(
        self,
        clock: VirtualClock,
        index: int,
        policy: Contract,
        cost: CostModel,
        log: RunLog,
        on_end: Callable[[Request], None],
        stages: int = 1,
    ) -> None:
        self.index = index
        self.scheduler = policy.scheduler
        self.kv_tokens = kv_tokens(policy.limits)
        self._policy = policy
        self.outstanding_tokens = 0
        self.outstanding_requests = 0
        self.listeners: list[LoadListener] = []
        self._known_tokens = 0  # sum of `known` over its requests after the last step that returned
        self._clock = clock
        self._cost = self._own_cost = cost
        self._slowed: list[float] = []  # factors of the present slowdowns
        self._log = log
        self._on_end = on_end
        self.hands_on: Callable[[Request], bool] | None = None
        self.on_planned: Callable[[StepPlan, int], None] | None = None
        self.network: SharedNetwork | None = None
        self.adapters: AdapterSlots | None = None
        self.encoder: Encoder | None = None
        self.reserved_requests = 0
        self._kept: dict[int, Request] = {}
        self._holds: dict[Request, int] = {}  # number of things that a request waits for before it can run
        overlaps = policy.limits.async_scheduling
        self._depth = stages + overlaps
        self._pipeline = Pipeline(cost, stages) if stages > 1 else None
        self._queues_idle_plans = overlaps and stages > 1
        pool = self.scheduler.pool  # recording the blocks of each step of a leap needs a paged pool without an observer
        counts = isinstance(pool, BlockPool) and not pool.observed
        self._leaps = stages == 1 and log.leaps and (counts or not log.keeps_steps)
        self._launched: deque[tuple[StepPlan, int]] = deque()  # plans and their end times
        self._last_end_ns = 0  # end of the last launched step
        self._alarm: Alarm | None = None  # alarm of the next action
        self._hold: Alarm | None = None  # alarm at the end of a hold (`Scheduler.hold_ns`)
        self.held_until: Callable[[int], int] | None = None  # if given, maps the begin of a hold to its end
        self._leap: Leap | None = None  # the present leap
        self._withdrawals = False  # True if steps in flight may hold rows of requests that have ended

    # Load, for routers and autoscalers

    @property
    def queued_requests(self) -> int:
        """The number of requests that wait to be admitted, including preempted requests.

        Requests that have KV blocks here and wait for their prefill elsewhere do not count.
        """
        return len(self.scheduler.waiting) - self.reserved_requests

    @property
    def known_tokens(self) -> int:
        """The number of prompt tokens and generated tokens of its queued and running requests, which need KV memory.

        Only the end of a request lowers this number. Tokens that several requests share count for each of them.
        """
        ended = 0 if self._leap is None else self._leap.ended(self._clock.now_ns)
        return self._known_tokens + ended * len(self.scheduler.decodes.members)

    @property
    def used_blocks(self) -> int:
        """The number of KV blocks that requests hold, including those taken for the present step."""
        pool = self.scheduler.pool
        leap_blocks = 0
        if self._leap is not None:
            # A step that ends now counts as ended, and the next step is not planned yet.
            planned = self._leap.ended(self._clock.now_ns - 1) + 1
            leap_blocks = pool.net_blocks(self.scheduler.decodes, planned)
        return pool.total - pool.free + leap_blocks

    # Calls from outside

    def offer(self, arrived: WorkloadRequest, arrival_ns: int, attempts: int = 1, outputs: int = 0) -> Request:
        """Take a request that is routed here now; a prefill replica samples its first `outputs`."""
        self._end_leap()
        request = self._policy.add_prefilled(arrived, outputs) if outputs else self._policy.add(arrived)
        self._log.arrived(self.index, request, arrival_ns, self._clock.now_ns, attempts, outputs > 0)
        self._accept(request)
        return request

    def take_over(self, arrived: WorkloadRequest, prefilled: Request, outputs: int) -> Request:
        """Take a request that is routed to this replica now, to decode it after its first `outputs` output tokens.

        `prefilled` is the part of the request that a prefill replica ran.
        """
        self._end_leap()
        request = self._policy.add_prefilled(arrived, outputs)
        self._log.taken_over(self.index, prefilled, request)
        self._accept(request)
        return request

    def prefill(self, arrived: WorkloadRequest) -> Request:
        """Take the prompt of a request that has KV blocks on a decode replica."""
        self._end_leap()
        request = self._policy.add(arrived)
        self._log.prefills(self.index, request)
        self._accept(request)
        return request

    def _accept(self, request: Request) -> None:
        if request.status is Status.REJECTED:
            self._log.ended(request, self._clock.now_ns)
            self._on_end(request)
            return
        self.outstanding_requests += 1
        self.outstanding_tokens += request.max_len
        self._known_tokens += request.known
        if compile_ns := request.arrived.grammar_compile_ns:
            self.hold(request)
            self._clock.start(self._compile(request, compile_ns))
        for listener in self.listeners:
            listener.load_grew(self)
        if self._alarm is None:
            self._set(self._clock.now_ns, PLANNING, self._plan)

    def _compile(self, request: Request, ns: int) -> ProcessGenerator:
        """Let `request` run when its grammar has been compiled."""
        yield self._clock.until(self._clock.now_ns + ns, ARRIVAL)
        self.let_go(request)

    def hold(self, request: Request) -> None:
        """Let other requests pass `request` until `let_go` has been called as often as `hold`."""
        self._holds[request] = self._holds.get(request, 0) + 1
        request.await_grammar()

    def let_go(self, request: Request) -> None:
        """End one hold of `request`, unless it has ended."""
        left = self._holds.pop(request, 1) - 1
        if request.ended:
            return
        self._wake()
        if left:
            self._holds[request] = left
        else:
            request.compiling = False

    def withdraw(self, request: Request) -> None:
        """Drop a request that has not ended. A step in flight that computes it continues."""
        self._end_leap()
        self._policy.abort(request.id)
        self._holds.pop(request, None)
        self._withdrawals = bool(self._launched) or bool(self._policy.leaving)
        self._shed_load(request)
        # no event is due, so plan now: other requests may have waited for the place of this request
        if self._alarm is None:
            self._set(self._clock.now_ns, PLANNING, self._plan)

    def share(self, network: SharedNetwork) -> None:
        """Share `network` with KV transfers from now on. A step shares it with the transfers present at its launch."""
        self.network, self._leaps = network, False

    def connect(self, external: ExternalKv) -> None:
        """Let its scheduler load KV from `external` from now on. Raises UserError if its policy does not support it."""
        self._policy.connect(external)

    def loaded(self, request: Request) -> None:
        """Let `request` run, because its load of KV ends now."""
        self._wake()
        self._policy.loaded(request)

    def load_failed(self, request: Request) -> None:
        """Let `request` wait again, because its load of KV has failed."""
        self._wake()
        self._policy.load_failed(request)

    def release(self, request: Request) -> None:
        """Free the KV blocks that were kept when `request` ended."""
        self._wake()
        self._policy.release(request)
        if self._kept.pop(request.id, None):
            self._shed_load(request)

    def _wake(self) -> None:
        """Plan a step after all other events of this time, because a request may wait for the coming change."""
        self._end_leap()
        if self._alarm is None:
            self._set(self._clock.now_ns, PLANNING, self._plan)

    @property
    def steps_in_flight(self) -> int:
        """The number of steps that are launched and have not returned."""
        return sum(1 for plan, _ in self._launched if plan.tokens)

    def crash(self) -> list[Request]:
        """Stop forever; return the requests that were here: those kept for another replica, then all others."""
        self._end_leap()  # steps of the leap that have ended count
        self._alarm = self._hold = None
        kept, lost = list(self._kept.values()), list(self.scheduler.requests.values())
        for request in lost:
            self._policy.abort(request.id)
            self._shed_load(request)
        for request in kept:
            self.release(request)
        while self._launched:
            self._policy.commit(self._next_to_return())  # commits the steps in flight, for which no request is left
        return kept + lost

    def slow_down(self, factor: float) -> None:
        """Let steps that are planned from now on take `factor` times as long."""
        self._slowed.append(factor)
        self._change_pace()

    def speed_up(self, factor: float) -> None:
        """End one slowdown by `factor`."""
        self._slowed.remove(factor)
        self._change_pace()

    def _change_pace(self) -> None:
        self._end_leap()
        self._cost = paced(self._own_cost, prod(sorted(self._slowed)))
        if self._pipeline:
            self._pipeline.price_by(self._cost)

    # Planning and launching

    def _set(self, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self._alarm = Alarm(self._clock, at_ns, order, callback)

    def _plan(self, alarm: Alarm) -> None:
        if alarm is self._alarm:
            self._launch_steps(self._clock.now_ns)

    def _launch_steps(self, now: int) -> None:
        policy, launched = self._policy, self._launched
        while self._may_plan():
            if self._leaps and (steps := policy.steady_steps()) > 1:
                self._begin_leap(steps, now)
                return
            if (plan := self._next_plan(now)) is None:
                break
            if not plan.tokens:
                self._queue_idle(plan, now)
                continue
            cpu_ns = self._cost.cpu_ns(plan)
            if self.adapters is not None:
                cpu_ns += self.adapters.ready_ns(plan)
            start, stages_ns = now + cpu_ns, None
            if self._pipeline is not None:
                start, end, stages_ns = self._pipeline.enter(plan, max(start, self._tokens_ns))
                self._pipeline.sampled(end if plan.sampled_rows else 0)
            else:
                start = max(start, self._last_end_ns)
                step_ns = self._cost.step_ns(plan)
                if plan.adapters:
                    step_ns += self._adapters_ns(plan.adapters, plan.tokens)
                if plan.encoded and self.encoder is not None:
                    step_ns += self.encoder.encode_ns(plan, prod(sorted(self._slowed)))
                if self.network is not None:
                    step_ns += self.network.wait_ns(plan.tokens, step_ns)
                end = start + step_ns
            self._last_end_ns = end
            launched.append((plan, end))
            self._log.planned(self.index, self.scheduler, plan, now, start, end, stages_ns)
            if self.on_planned is not None:
                self.on_planned(plan, end)
            if cpu_ns:
                if len(launched) < self._depth:
                    self._set(now + cpu_ns, PLANNING, self._plan)
                    return
                now += cpu_ns
        if launched:
            self._set(max(launched[0][1], now), STEP_ENDS + self.index, self._commit)
        else:
            self._rest()

    def _adapters_ns(self, adapters: dict[str, int], tokens: int) -> int:
        """Return the time that `adapters`, with their numbers of tokens, add to a step of `tokens` tokens."""
        if self.adapters is None:
            return 0
        slowed: float = prod(sorted(self._slowed))  # without this type mypyc takes the product for an int
        return round(self.adapters.added_ns(adapters, tokens) * slowed)

    @property
    def _tokens_ns(self) -> int:
        """The time at which the input tokens of the next plan are there.

        It is 0, because they are there when the plan is made, except in the overlapped loop with several stages.
        """
        return self._pipeline.tokens_ns if self._queues_idle_plans and self._pipeline is not None else 0

    def _may_plan(self) -> bool:
        """Return whether another step may be planned now.

        The number of steps in flight is limited. With one stage, the next plan also waits until the tokens of a step
        with structured requests are known, because their masks depend on these tokens.
        """
        launched = self._launched
        waits_for_masks = bool(launched) and launched[-1][0].masked_rows > 0 and self._pipeline is None
        return len(launched) < self._depth and not waits_for_masks

    def _queue_idle(self, plan: StepPlan, now: int) -> None:
        """Put the empty `plan` behind the steps in flight; it ends with the last of them."""
        assert self._pipeline is not None
        self._launched.append((plan, max(now, self._launched[-1][1])))
        self._pipeline.sampled(0)

    def _next_to_return(self) -> StepPlan:
        """Remove and return the oldest step in flight; also remove the empty plans right behind it."""
        launched = self._launched
        plan, _ = launched.popleft()
        while launched and not launched[0][0].tokens:
            launched.popleft()
        return plan

    def _rest(self) -> None:
        """Stop stepping, because no step is in flight and none is planned."""
        self._alarm = None
        if self.network is not None:
            self.network.rest()

    def _next_plan(self, now: int) -> StepPlan | None:
        """Return the plan to run next; None if there is none.

        An empty plan is returned only if it takes a place among the steps in flight.
        """
        queues_idle = self._queues_idle_plans and bool(self._launched)
        if queues_idle and not self.scheduler.requests:
            return None
        while True:
            plan = self._policy.schedule()
            if plan.preempted:
                self._log.preempted(self.index, plan.preempted, now)
            if plan.tokens:
                self._hold = None
                return plan
            if queues_idle:
                return plan
            if self._launched:
                return None
            if not plan.preempted:
                self._policy.must_get_on(plan)
                self._wait_for_more(now)
                return None
            # The plan only preempted requests, so there are more free blocks now: plan again.

    def _wait_for_more(self, now: int) -> None:
        """Wait, because nothing is planned. If the policy holds requests, set an alarm for the end of the hold."""
        hold_ns = self._policy.hold_ns
        if not hold_ns:
            self._hold = None
        elif self._hold is None:
            until = now + hold_ns if self.held_until is None else self.held_until(now)
            self._hold = Alarm(self._clock, until, PLANNING, self._hold_no_longer)

    def _hold_no_longer(self, alarm: Alarm) -> None:
        if alarm is self._hold:
            self._hold = None
            self._policy.hold_no_longer()
            self._wake()

    def _commit(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        plan = self._next_to_return()
        now = self._clock.now_ns
        if self._withdrawals:
            self._known_tokens -= plan.sampled_for_nobody()
            self._withdrawals = bool(self._launched) or bool(self._policy.leaving)
        finished = self._policy.commit(plan)
        if self._launched and (plan.accepted_tokens or any(one.true_len < one.max_len for one in finished)):
            self._withdrawals = True  # a step in flight may have been planned beyond the end of a request
        self._known_tokens += plan.sampled_rows + plan.accepted_tokens
        self._log.committed(self.index, plan, now)
        for request in finished:
            self._end(request, now)
        self._plan_after_arrivals(now)

    def _plan_after_arrivals(self, now: int) -> None:
        """Plan now, or after the other events of this time if there are any."""
        if self._clock.peek() > now:
            self._launch_steps(now)
        else:
            self._set(now, PLANNING, self._plan)

    def _end(self, request: Request, now: int) -> None:
        if self.hands_on is not None and self.hands_on(request):
            self._kept[request.id] = request
            return
        self._shed_load(request)
        self._log.ended(request, now)
        self._on_end(request)

    def _shed_load(self, request: Request) -> None:
        self.outstanding_requests -= 1
        self.outstanding_tokens -= request.max_len
        self._known_tokens -= request.known
        for listener in self.listeners:
            listener.load_shrank(self)

    # Leaps

    def _begin_leap(self, steps: int, now: int) -> None:
        decodes, launched = self.scheduler.decodes, self._launched
        rows = len(decodes.members)
        durations = self._cost.decode_run_ns(rows, decodes.context, decodes.squares, steps)
        if decodes.adapters and (more_ns := self._adapters_ns(decodes.adapters, rows)):
            if isinstance(durations, DecodeRun):
                durations = durations.longer(more_ns)
            else:
                durations = [ns + more_ns for ns in durations]
        cpu_ns = 0
        if launched or self._log.keeps_steps:
            plan = launched[0][0] if launched else StepPlan.from_amounts(decode_rows=rows, sampled_rows=rows)
            cpu_ns = self._cost.cpu_ns(plan)
            self._log.step_log.leaps(self.index, now)
        self._leap = Leap(durations, now, cpu_ns, launched[0][1] if launched else None)
        self._set(self._leap.turn_ns(self._leap.steps - 1), STEP_ENDS + self.index, self._land)

    def _land(self, alarm: Alarm) -> None:
        leap = self._leap
        if alarm is not self._alarm or leap is None:
            return
        self._leap = None
        self._log.step_log.lands(self.index)
        now = self._clock.now_ns
        for request in self._skip(leap, leap.steps):
            self._end(request, now)
        self._plan_after_arrivals(now)

    def _skip(self, leap: Leap, steps: int) -> list[Request]:
        """Take the first `steps` steps of `leap` at once; return the requests that finished."""
        self._last_end_ns = leap.end_ns(steps - 1)
        self._known_tokens += steps * len(self.scheduler.decodes.members)
        self._log.leapt(self.index, self.scheduler, leap, steps)
        finished = self._policy.skip(steps)
        if self._launched:
            self._launched[0] = self._launched[0][0], self._last_end_ns
        return finished

    def _end_leap(self) -> None:
        """End the leap, because an event interrupts it: take the steps that have ended, and plan the present step."""
        leap = self._leap
        if leap is None:
            return
        self._leap = None
        now = self._clock.now_ns
        self._log.step_log.lands(self.index)
        if ended := leap.ended(now):
            self._skip(leap, ended)
            if leap.turn_ns(ended - 1) == now:
                self._set(now, PLANNING, self._plan)
                return
        plan = self._policy.schedule()
        self._policy.must_be_steady(plan)
        self._last_end_ns = end_ns = leap.end_ns(ended)
        self._launched.append((plan, end_ns))
        self._log.planned(self.index, self.scheduler, plan, leap.plan_ns(ended), leap.start_ns(ended), end_ns)
        self._set(leap.turn_ns(ended), STEP_ENDS + self.index, self._commit)
