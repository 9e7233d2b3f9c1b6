"""What must hold after any arrivals, aborts, early stops and preemptions, for every policy and loop."""

import random
import sys
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import blocks_for
from tokentwin.serving.kv.grouped_pool import GroupedPool
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import POLICIES, Scheduler, find_policy
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Segment, WorkloadRequest

SETTINGS = examples(0.4)


class Driver:
    """Runs a scheduler with `depth` steps in flight and checks everything after every call.

    In the overlapped loop a request may decode in several steps in flight; in a pipeline it may not.
    """

    def __init__(
        self, policy: str, config: SchedulerConfig, shares: bool, depth: int = 1, overlapped: bool = False
    ) -> None:
        config = config.model_copy(update={"async_scheduling": overlapped})
        self.config = config
        self.overlapped = overlapped
        self.scheduler: Scheduler = find_policy(policy)(config, shares_prefixes=shares)
        self.depth = depth
        self.flying: deque[tuple[StepPlan, list[int]]] = deque()
        self.all: dict[int, Request] = {}
        self.sampled: dict[int, list[int]] = {}
        self.finished: list[int] = []
        self.aborted: list[int] = []
        self.admissions: list[int] = []
        self.seen: list[tuple[int, Request, int, list[int]]] = []  # step, request, preemptions, blocks read

    def add(self, arrived: WorkloadRequest) -> None:
        self.all[arrived.id] = self.scheduler.add(arrived)
        self.check()

    def abort(self, id: int) -> None:
        alive = id in self.scheduler.requests
        assert (self.scheduler.abort(id) is not None) == alive
        self.aborted += [id] * alive
        assert self.all[id].ended
        self.check()

    def step(self, stop: random.Random | None = None) -> bool:
        """Plan until the loop must wait, then end the oldest step; False when there was nothing to do."""
        while len(self.flying) < self.depth:
            plan = self.scheduler.schedule()
            self.check_plan(plan)
            if not plan.tokens:
                break
        if not self.flying:
            if hold_ns := getattr(self.scheduler, "hold_ns", 0):
                self.scheduler.hold_no_longer()
            return bool(plan.preempted or hold_ns)
        plan, ids = self.flying.popleft()
        alive = [id for id in ids if not self.all[id].ended]
        stopped = {id for id in alive if stop and stop.random() < 0.1}
        finished = self.scheduler.commit(plan, stopped)
        self.finished += [request.id for request in finished]
        for id in alive:
            self.sampled.setdefault(id, []).append(plan.seq)
        assert stopped <= {request.id for request in finished}
        assert all(r.status is Status.FINISHED for r in finished)
        self.check()
        return True

    def check_plan(self, plan: StepPlan) -> None:
        rows = plan.rows()
        assert plan.ids_and_tokens() == ([row.request.id for row in rows], [row.tokens for row in rows])
        if not self.overlapped:
            awaited = {id for _, ids in self.flying for id in ids if not self.all[id].stale}
            assert not awaited & {row.request.id for row in rows}, "planned before its token is known"
        if isinstance(self.scheduler.pool, GroupedPool) and self.config.kv_groups:
            self.check_windows(self.scheduler.pool, plan)
        if plan.tokens:
            self.flying.append((plan, [row.request.id for row in rows if row.samples]))
        order = list(self.scheduler.running)
        assert [row.request.id for row in rows] == [id for id in order if id in {r.request.id for r in rows}]
        padding = [(row.start, row.tokens) for row in plan.padding for _ in range(row.rows)]
        computed = [(row.start, row.tokens) for row in rows] + padding
        assert plan.tokens == sum(tokens for _, tokens in computed) <= self.config.max_num_batched_tokens
        assert len(computed) <= self.config.max_num_seqs
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert plan.sampled_rows == sum(row.samples for row in rows)
        assert plan.decode_rows == sum(tokens == 1 for _, tokens in computed)
        assert plan.decode_context == sum(start for start, tokens in computed if tokens == 1)
        assert plan.decode_squares == sum(start**2 for start, tokens in computed if tokens == 1)
        many = [(start, tokens) for start, tokens in computed if tokens > 1]
        assert (plan.prefill_rows, plan.prefill_tokens) == (len(many), sum(tokens for _, tokens in many))
        assert plan.prefill_context == sum(start for start, _ in many)
        assert plan.pairs == sum(start + i + 1 for start, tokens in computed for i in range(tokens))
        self.admissions += [request.id for request in plan.admitted if not request.preemptions]
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.decodes.check()
        for request in scheduler.requests.values():
            request.check()
        waiting = [request.id for request in scheduler.waiting]
        assert sorted([*waiting, *scheduler.running]) == sorted(scheduler.requests), "lost or doubled"
        assert scheduler.decodes.members.keys() <= scheduler.running.keys()
        scheduler.pool.check(scheduler.requests.values())

    def check_windows(self, pool: GroupedPool, plan: StepPlan) -> None:
        """Check that blocks that queries see are held until their step returns, and that others are not held."""
        size = self.config.block_size
        flying = {flying.seq for flying, _ in self.flying}
        self.seen = [seen for seen in self.seen if seen[0] in flying]
        for request, start, tokens, *_ in plan.rows():
            for window, table in zip(self.config.kv_groups, pool.tables(request), strict=True):
                first = max(start - window + 1, 0) // size if window else 0
                blocks = table[first : blocks_for(start + tokens, size)]
                assert all(blocks)
                assert flying or not any(table[:first])
                self.seen.append((plan.seq, request, request.preemptions, blocks))
        for _, request, preemptions, blocks in self.seen:
            if not request.ended and request.preemptions == preemptions:
                kept = {block for table in pool.tables(request) for block in table}
                assert kept.issuperset(blocks)

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.requests and not self.flying:
                break
            assert self.step() or self.flying or not self.scheduler.requests, "stuck"
        assert not self.scheduler.requests
        assert self.scheduler.pool.free == self.scheduler.pool.total
        rejected = [id for id, request in self.all.items() if request.status is Status.REJECTED]
        assert sorted([*self.finished, *self.aborted, *rejected]) == sorted(self.all), "each ends once"
        for request in self.all.values():
            if request.status is Status.FINISHED and not self.flying:
                spans = [seq for first, count in request.sampled_in for seq in range(first, first + count)]
                assert spans[: request.outputs] == self.sampled[request.id]


LOOPS = st.sampled_from([(1, False), (2, True), (2, False), (3, False), (8, False)])  # depth, overlapped
GROUPS = [(2,), (7,), (9, 0), (16, 16, 0), (0, 5, 0)]  # windows of the groups of layers


@st.composite
def drivers(draw: st.DrawFn) -> tuple[Driver, random.Random]:
    size = draw(st.sampled_from([1, 2, 4, 16]))
    depth, overlapped = draw(LOOPS)
    groups = draw(st.sampled_from([(), *GROUPS])) if depth == 1 or overlapped else ()
    states = 0 if groups else draw(st.sampled_from([0, 0, 3]))
    caching = draw(st.booleans())
    aligned = states > 0 and caching and (depth == 1 or overlapped) and draw(st.booleans())
    config = SchedulerConfig(
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 3])),
        max_num_active_seqs=draw(st.sampled_from([None, 1])),
        max_num_scheduled_tokens=draw(st.sampled_from([None, None, 3])),
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        kv_groups=groups,
        state_blocks=states,
        mamba_cache_mode="align" if aligned else "none",
        num_prefill_checkpoint_blocks=draw(st.integers(0, 1)) if aligned else 0,
        prefix_cache_retention_interval=draw(st.sampled_from([0, 2 * size, None])),
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        max_num_batched_tokens=draw(st.sampled_from([1, 4, 16, 64])),
        max_model_len=64,
        block_size=size,
        num_blocks=1
        + (4 if aligned else 1) * states
        + max(len(groups), 1) * -(-64 // size)
        + draw(st.integers(0, 64 // size)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.2])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=caching,
        forget_withdrawn=draw(st.booleans()),
    )
    driver = Driver(draw(st.sampled_from(sorted(POLICIES))), config, draw(st.booleans()), depth, overlapped)
    return driver, random.Random(draw(st.integers(0, 2**32)))


@SETTINGS
@given(drivers())
def test_nothing_is_lost_whatever_happens(given_driver: tuple[Driver, random.Random]) -> None:
    driver, chance = given_driver
    shares = not driver.scheduler.pool.counts_only
    for id in range(chance.randrange(1, 25)):
        shared: list[Segment] = [("sys", 20)] if shares and chance.random() < 0.5 else []
        prompt = (*shared, ("", chance.randrange(1, 30)))
        skips = chance.random() < 0.2
        driver.add(
            WorkloadRequest(
                id, id, prompt, chance.randrange(1, 14), chance.randrange(3), skip_reading_prefix_cache=skips
            )
        )
        for _ in range(chance.randrange(4)):
            driver.step(stop=chance)
        if chance.random() < 0.2:
            driver.abort(chance.randrange(id + 1))
    driver.drain()
    assert all(request.ended for request in driver.all.values())


@SETTINGS
@given(st.integers(0, 2**32), LOOPS)
def test_fcfs_admits_in_order_of_arrival_and_starves_nobody(seed: int, loop: tuple[int, bool]) -> None:
    chance = random.Random(seed)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4, num_blocks=24)
    driver = Driver("vllm", config, False, *loop)
    for id in range(30):
        driver.add(WorkloadRequest(id, id, (("", chance.randrange(1, 40)),), chance.randrange(1, 20)))
        driver.step()
    driver.drain()
    assert driver.admissions == sorted(driver.admissions)
    assert all(request.status is Status.FINISHED for request in driver.all.values())


@given(
    window=st.integers(2, 70),
    size=st.sampled_from([1, 4, 16]),
    prompt=st.integers(1, 100),
    output=st.integers(1, 60),
    budget=st.sampled_from([5, 16, 200]),
)
@examples(0.2)
def test_a_request_holds_what_its_windows_see(window: int, size: int, prompt: int, output: int, budget: int) -> None:
    config = SchedulerConfig(
        kv_groups=(window, window, 0), max_num_batched_tokens=budget, max_model_len=200, block_size=size, num_blocks=999
    )
    driver = Driver("vllm", config, shares=False)
    driver.add(WorkloadRequest(0, 0, (("", prompt),), output))
    most = blocks_for(min(window - 1 + budget, 200), size) + 1
    pool, request = driver.scheduler.pool, driver.all[0]
    while not request.ended:
        start = request.computed
        driver.step()
        if not request.ended:
            full, left = blocks_for(request.computed, size), max(start - window + 1, 0) // size
            assert pool.total - pool.free == full + 2 * (full - left)
            assert full - left <= most
    assert pool.free == pool.total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("prompt", "output", "says"),
    [(60, 5, "exceed max_model_len 64"), (40, 20, "needs 15 KV blocks"), (0, 5, "at least one prompt token")],
)
def test_what_can_never_fit_is_rejected_at_once(policy: str, prompt: int, output: int, says: str) -> None:
    config = SchedulerConfig(max_model_len=64, block_size=4, num_blocks=10, max_num_batched_tokens=64)
    driver = Driver(policy, config, shares=False, depth=1)
    driver.add(WorkloadRequest(0, 0, (("", prompt),) if prompt else (), output))
    driver.add(WorkloadRequest(1, 0, (("", 10),), 5))
    assert driver.all[0].status is Status.REJECTED
    assert says in driver.all[0].reason
    driver.drain()
    assert driver.all[1].status is Status.FINISHED


def test_static_batches_are_waited_for_and_have_one_shape() -> None:
    """Each computes what a tensor of one shape would: its rows, times the longest prompt and the longest output."""
    config = SchedulerConfig(max_num_seqs=4, max_model_len=64, num_blocks=100)
    driver = Driver("static", config, shares=False, depth=1)
    seen: list[set[int]] = []
    tokens = holds = 0
    for id in range(10):
        driver.add(WorkloadRequest(id, 0, (("", 8 + id),), 3 + 5 * (id % 4)))
    schedule = driver.scheduler.schedule

    def counted() -> StepPlan:
        nonlocal tokens
        plan = schedule()
        tokens += plan.tokens
        return plan

    driver.scheduler.schedule = counted
    while driver.step():
        holds += driver.scheduler.hold_ns > 0
        running = set(driver.scheduler.running)
        if running and (not seen or not running <= seen[-1]):
            seen.append(running)
    assert [len(batch) for batch in seen] == [4, 4, 2] and holds
    expected = 0
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        expected += len(ids) * (8 + max(ids) + max(3 + 5 * (id % 4) for id in ids) - 1)
    assert tokens == expected


class NoMixing(Driver):
    """Also checks that nobody is admitted beside decodes and, where there are `plenty` of blocks, that none mix."""

    plenty = False

    def check_plan(self, plan: StepPlan) -> None:
        rows = [row for row in plan.rows() if row.request not in plan.admitted]
        decodes = [row.request.prompt_len <= row.start == row.request.known - 1 for row in rows]
        assert not (any(decodes) and plan.admitted)
        assert len(set(decodes)) <= 1 or not self.plenty
        super().check_plan(plan)


@pytest.mark.parametrize("num_blocks", [17, 30, 400])
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("budget", [5, 20])
def test_prefill_first_never_admits_beside_decodes(num_blocks: int, reserve: bool, budget: int) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_model_len=64,
        block_size=4,
        num_blocks=num_blocks,
        scheduler_reserve_full_isl=reserve,
    )
    for seed in range(5):
        driver = NoMixing("prefill-first", config, shares=False, depth=1)
        driver.plenty = num_blocks == 400
        chance = random.Random(seed)
        for id in range(30):
            driver.add(WorkloadRequest(id, id, (("", chance.randrange(2, 40)),), chance.randrange(1, 20)))
            for _ in range(chance.randrange(4)):
                driver.step()
        driver.drain()
        assert driver.scheduler.decodes.clock > 0


def at_once(config: SchedulerConfig) -> SchedulerConfig:
    """Return settings without a wait for more requests, which takes a loop with a clock."""
    return config.model_copy(update={"static_timeout_ms": 0.0})


def leapt(
    policy: str, config: SchedulerConfig, requests: list[WorkloadRequest], leaps: bool, shares: bool = False
) -> list[object]:
    """Return steps between arrivals, spans of tokens and the state after each step; by leaps where offered."""
    scheduler = find_policy(policy)(at_once(config), shares_prefixes=shares)
    to_come = deque(requests)
    all_of_them: list[Request] = []
    log: list[object] = []
    done = 0  # steps
    while to_come or scheduler.requests:
        while to_come and (to_come[0].arrival_ns <= done or not scheduler.requests):
            all_of_them.append(scheduler.add(to_come.popleft()))
        steps = scheduler.steady_steps()
        if to_come:
            steps = min(steps, to_come[0].arrival_ns - done)
        if steps > 0 and leaps:
            left = scheduler.pool.free - scheduler.pool.net_blocks(scheduler.decodes, steps)
            finished = scheduler.skip(steps)
            assert finished or scheduler.pool.free == left
        else:
            steps = max(steps, 1)
            for left in range(steps, 0, -1):
                plan = scheduler.schedule()
                assert steps == 1 or not (plan.listed or plan.preempted or plan.admitted), "promised to be steady"
                finished = scheduler.commit(plan) if plan.tokens else []
                assert left == 1 or not finished
        done += steps
        scheduler.decodes.check()
        log.append((done, scheduler.pool.free, scheduler.decodes.context, [request.id for request in finished]))
        log.append(
            [(r.id, r.known, r.computed, r.block_count) for r in scheduler.running.values() if r.decodes is None]
        )
        log.append([(r.id, r.known, r.computed, list(r.blocks)) for r in scheduler.running.values()])
    return [log, [(r.id, r.status, r.first_hit, r.preemptions, _joined(r.sampled_in)) for r in all_of_them]]


def _joined(spans: list[tuple[int, int]]) -> list[int]:
    return [step for first, count in spans for step in range(first, first + count)]


@pytest.mark.parametrize("policy", POLICIES)
@SETTINGS
@given(st.integers(0, 2**32))
def test_skipping_steady_steps_is_taking_them_one_by_one(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([1, 3, 4, 16])
    groups = chance.choice([(), (), *GROUPS])
    config = SchedulerConfig(
        kv_groups=groups,
        max_num_seqs=chance.choice([2, 4, 16]),
        max_num_batched_tokens=chance.choice([3, 8, 40]),
        max_model_len=128,
        block_size=size,
        num_blocks=1 + max(len(groups), 1) * -(-128 // size) * chance.choice([1, 2, 4]),
        long_prefill_token_threshold=chance.choice([0, 5]),
        scheduler_reserve_full_isl=chance.random() < 0.5,
        watermark=chance.choice([0.0, 0.1]),
        policy=chance.choice(["fcfs", "priority"]),
    )
    arrival, requests = 0, []
    for id in range(chance.randrange(1, 16)):
        arrival += chance.choice([0, 1, 9, 60])
        prompt = (("", chance.randrange(1, 60)),)
        requests.append(WorkloadRequest(id, arrival, prompt, chance.randrange(1, 68), chance.randrange(2)))
    assert leapt(policy, config, requests, leaps=True) == leapt(policy, config, requests, leaps=False)
    talks = conversations(requests, chance)
    shared = [leapt(policy, config, talks, leaps, shares=True) for leaps in (True, False)]
    assert shared[0] == shared[1]


def conversations(requests: list[WorkloadRequest], chance: random.Random) -> list[WorkloadRequest]:
    """Return these arrivals, half of which continue an earlier prompt and its answer, to hit its blocks."""
    talks: list[WorkloadRequest] = []
    for request in requests:
        before: tuple[Segment, ...] = (("system", 9),)
        if talks and chance.random() < 0.5:
            earlier = chance.choice(talks)
            before = (*earlier.prompt, (f"out:{earlier.id}", chance.randrange(1, earlier.output_len + 1)))
        talks.append(replace(request, prompt=(*before, (f"user{request.id}", chance.randrange(1, 20)))))
    return talks


def calls_in_a_steady_step(batch: int) -> int:
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8 * batch, num_blocks=40 * batch + 1)
    scheduler = find_policy("vllm")(config, shares_prefixes=False)
    for id in range(batch):
        scheduler.add(WorkloadRequest(id, 0, (("", 8),), 300))
    for _ in range(4):
        scheduler.commit(scheduler.schedule())
    assert len(scheduler.decodes) == batch
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(16):  # every phase of a block
            scheduler.commit(scheduler.schedule())
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.pure
def test_a_steady_step_costs_the_same_for_8_and_for_512_requests() -> None:
    assert calls_in_a_steady_step(8) == calls_in_a_steady_step(512)
