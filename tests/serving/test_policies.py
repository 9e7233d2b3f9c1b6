"""What each scheduling policy promises: against `vllm` where they coincide, and against the theory they come from."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.budget import examples
from tests.serving.test_scheduler_properties import LOOPS, Driver, leapt
from tests.traces.test_run_metrics import finished, requests_table
from tokentwin.calibration.validation import decision_replay
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.multimodal import MultimodalConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.fair import FairScheduler
from tokentwin.serving.policies.sglang_scheduler import SglangScheduler
from tokentwin.serving.predictions import predicted_tokens
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import Scheduler, find_policy
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import PRIVATE, Item, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

NEW = ("sarathi", "sjf", "priority-ageing", "edf", "fair")
SOME = examples(0.2)
FEW = examples(0.1)
EDF_MS = {"chat": 0.00002, "batch": 0.0005}  # in these tests a step takes a nanosecond
SEEDS = st.integers(0, 2**32)


def traffic(chance: random.Random, count: int, **fixed: Any) -> list[WorkloadRequest]:
    """Return requests of four tenants, two SLO classes and three priorities, in bursts; no two arrive together."""
    arrival, requests = 0, []
    for id in range(count):
        arrival += chance.choice([1, 1, 2, 9, 60])
        drawn = {
            "prompt": (("", chance.randrange(1, 60)),),
            "output_len": chance.randrange(1, 68),
            "priority": chance.randrange(3),
            "tenant": chance.choice("aaaabcd"),
            "slo_class": chance.choice(["chat", "batch", "other"]),
        }
        requests.append(WorkloadRequest(id, arrival, **{**drawn, **fixed}))
    return requests


def tight(chance: random.Random, **fixed: Any) -> SchedulerConfig:
    """Return settings under which requests wait, are cut and are preempted."""
    size = chance.choice([1, 3, 4, 16])
    drawn = {
        "max_num_seqs": chance.choice([2, 4, 16]),
        "max_num_batched_tokens": chance.choice([3, 8, 40]),
        "max_model_len": 128,
        "block_size": size,
        "num_blocks": 1 + -(-128 // size) * chance.choice([1, 2, 4]),
        "long_prefill_token_threshold": chance.choice([0, 5]),
        "scheduler_reserve_full_isl": chance.random() < 0.5,
        "watermark": chance.choice([0.0, 0.1]),
        "policy": chance.choice(["fcfs", "priority"]),
        "sarathi_token_budget": chance.choice([0, 5, 20]),
        "sjf_error": chance.choice([0.0, 0.7]),
        "ageing_s": chance.choice([0.0, 5e-9, 1.0]),
        "edf_ttft_ms": chance.choice([{}, EDF_MS]),
    }
    return SchedulerConfig(**{**drawn, **fixed})


def drive(
    scheduler: Scheduler,
    requests: Iterable[WorkloadRequest],
    depth: int = 1,
    look: Callable[[StepPlan], None] = lambda plan: None,
) -> list[object]:
    """Run a scheduler to its end and return every decision. A step takes a nanosecond; `look` gets each plan."""
    to_come, flying, log = deque(requests), deque[StepPlan](), list[object]()
    for now in itertools.count():
        while to_come and to_come[0].arrival_ns <= now:
            scheduler.add(to_come.popleft())
        while len(flying) < depth:
            plan = scheduler.schedule()
            look(plan)
            if plan.tokens or plan.preempted:
                log.append([now, [(row.request.id, row.tokens) for row in plan.rows()], [r.id for r in plan.preempted]])
            if not plan.tokens:
                break
            flying.append(plan)
        if flying:
            scheduler.commit(flying.popleft())
        elif not to_come and not scheduler.requests:
            return log
        elif getattr(scheduler, "hold_ns", 0):
            scheduler.hold_no_longer()
        assert now < 100_000, "never ends"
    raise AssertionError


def decisions(policy: str, config: SchedulerConfig, requests: list[WorkloadRequest], depth: int = 1) -> list[object]:
    return drive(find_policy(policy)(config, shares_prefixes=False), requests, depth)


# Where two policies coincide


@SOME
@given(SEEDS, st.sampled_from(["sjf", "priority-ageing", "edf"]))
def test_with_equal_scores_a_ranked_policy_is_fcfs(seed: int, policy: str) -> None:
    chance = random.Random(seed)
    config = tight(chance, policy="fcfs", ageing_s=0.0, edf_ttft_ms={}, sjf_error=0.0)
    requests = traffic(chance, 15, output_len=20)
    assert decisions(policy, config, requests) == decisions("vllm", config, requests)


@SOME
@given(SEEDS, LOOPS)
def test_one_tenant_has_the_engine_to_itself(seed: int, loop: tuple[int, bool]) -> None:
    chance = random.Random(seed)
    depth, overlapped = loop
    config = tight(chance, policy="fcfs", async_scheduling=overlapped)
    requests = traffic(chance, 15, tenant="only")
    assert decisions("fair", config, requests, depth) == decisions("vllm", config, requests, depth)


@SOME
@given(SEEDS, LOOPS)
def test_ageing_that_takes_for_ever_is_strict_priority(seed: int, loop: tuple[int, bool]) -> None:
    chance = random.Random(seed)
    depth, overlapped = loop
    config = tight(chance, policy="priority", ageing_s=1e9, forget_withdrawn=True, async_scheduling=overlapped)
    requests = traffic(chance, 15)
    assert decisions("priority-ageing", config, requests, depth) == decisions("vllm", config, requests, depth)


# What holds for all of them


@pytest.mark.parametrize("policy", NEW)
@SOME
@given(SEEDS)
def test_skipping_steady_steps_is_taking_them_one_by_one(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    config, requests = tight(chance), traffic(chance, chance.randrange(1, 20))
    assert leapt(policy, config, requests, leaps=True) == leapt(policy, config, requests, leaps=False)


@pytest.mark.parametrize("policy", NEW)
@SOME
@example(450, (3, False))  # under `fair` tenants served alike, whose requests could lose their places for ever
@given(SEEDS, LOOPS)
def test_blocks_with_and_without_identities_are_decided_alike(policy: str, seed: int, loop: tuple[int, bool]) -> None:
    chance = random.Random(seed)
    depth, overlapped = loop
    config, requests = tight(chance, async_scheduling=overlapped), traffic(chance, 15)

    named, counted = (
        drive(find_policy(policy)(config, shares_prefixes=shares), requests, depth) for shares in (True, False)
    )
    assert named == counted


@pytest.mark.parametrize("policy", NEW)
@SOME
@given(SEEDS, LOOPS)
def test_nothing_is_lost_among_tenants_and_classes(policy: str, seed: int, loop: tuple[int, bool]) -> None:
    chance = random.Random(seed)
    driver = Driver(policy, tight(chance), chance.random() < 0.5, *loop)
    for arrived in traffic(chance, 15):
        driver.add(arrived)
        for _ in range(chance.randrange(4)):
            driver.step(stop=chance)
        if chance.random() < 0.2:
            driver.abort(chance.randrange(arrived.id + 1))
    driver.drain()
    assert all(request.ended for request in driver.all.values())


@pytest.mark.parametrize("policy", NEW)
@SOME
@given(SEEDS)
def test_no_place_is_left_free_while_somebody_waits(policy: str, seed: int) -> None:
    """Work conservation: with blocks for all, requests wait only for a seat or for tokens."""
    chance = random.Random(seed)
    config = tight(chance, num_blocks=5000, long_prefill_token_threshold=0, watermark=0.0)
    budget = config.max_num_batched_tokens
    if policy == "sarathi":
        budget = min(config.sarathi_token_budget or budget, budget)
    scheduler = find_policy(policy)(config, shares_prefixes=False)

    def look(plan: StepPlan) -> None:
        assert not plan.preempted
        if scheduler.waiting:
            assert len(scheduler.running) == config.max_num_seqs or plan.tokens >= budget

    drive(scheduler, traffic(chance, 15), look=look)


# sarathi


@pytest.mark.parametrize("num_blocks", [60, 2000])
@SOME
@given(SEEDS)
def test_under_sarathi_no_decode_waits_and_chunks_get_the_rest(num_blocks: int, seed: int) -> None:
    chance = random.Random(seed)
    config = tight(
        chance, max_num_seqs=8, max_num_batched_tokens=16, block_size=4, num_blocks=num_blocks, policy="fcfs"
    )
    scheduler = find_policy("sarathi")(config, shares_prefixes=False)
    decoding: set[int] = set()

    def look(plan: StepPlan) -> None:
        nonlocal decoding
        rows = plan.rows()
        served = {row.request.id for row in rows}
        lost = {request.id for request in plan.preempted}
        decoding &= scheduler.requests.keys()  # less what has finished since
        assert decoding <= served | lost
        if lost & decoding:  # for blocks that other decodes need: prompts gave theirs first
            assert not [row for row in rows if row.request.id not in decoding]
        ones = sum(row.tokens == 1 for row in rows)
        assert plan.tokens <= max(config.sarathi_token_budget or 16, ones)
        decoding = {r.id for r in scheduler.running.values() if r.known + r.placeholders - r.computed == 1}

    drive(scheduler, traffic(chance, 20), look=look)


def test_sarathi_alone_is_not_vllm() -> None:
    def first_step(policy: str) -> int:
        scheduler = find_policy(policy)(SchedulerConfig(max_num_batched_tokens=4096), shares_prefixes=False)
        scheduler.add(WorkloadRequest(0, 0, ((PRIVATE, 3000),), 5))
        return scheduler.schedule().tokens

    assert (first_step("sarathi"), first_step("vllm")) == (512, 3000)


def decodes_lost_to_chunks(policy: str) -> int:
    """Count the steps that preempt a decoding request and compute a chunk of a prompt."""
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        max_model_len=128,
        block_size=4,
        num_blocks=40,
        long_prefill_token_threshold=8,
        scheduler_reserve_full_isl=False,
    )
    scheduler = find_policy(policy)(config, shares_prefixes=False)
    decoding: set[Request] = set()
    lost = 0

    def look(plan: StepPlan) -> None:
        nonlocal decoding, lost
        lost += bool(plan.prefill_rows and decoding.intersection(plan.preempted))
        decoding = {r for r in scheduler.running.values() if r.known + r.placeholders - r.computed == 1}

    drive(scheduler, traffic(random.Random(5), 60), look=look)
    return lost


def test_vllm_takes_blocks_from_decodes_for_chunks_and_sarathi_does_not() -> None:
    assert decodes_lost_to_chunks("vllm") > 3
    assert decodes_lost_to_chunks("sarathi") == 0


# One server: requests one at a time, a token a nanosecond

ALONE = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128, num_blocks=100)


def admissions(policy: str, requests: list[WorkloadRequest], /, **more: Any) -> dict[int, int]:
    """Return when each request was admitted, in order of admission."""
    at: dict[int, int] = {}
    log = decisions(policy, SchedulerConfig(**{**ALONE.model_dump(), **more}), requests)
    for now, rows, _ in log:  # type: ignore[misc]
        for id, _ in rows:
            at.setdefault(id, now)
    return at


def job(id: int, arrival_ns: int, length: int, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(id, arrival_ns, (("", 4),), length, **more)


@SOME
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_sjf_has_the_least_mean_wait(lengths: list[int]) -> None:
    jobs = [job(id, 0, length) for id, length in enumerate(lengths)]
    shortest_first = list(itertools.accumulate(sorted(lengths), initial=0))[:-1]
    waits = admissions("sjf", jobs)
    assert sorted(waits.values()) == shortest_first
    assert fmean(waits.values()) <= fmean(admissions("vllm", jobs).values())
    assert fmean(waits.values()) <= fmean(admissions("sjf", jobs, sjf_error=1.0).values())


def test_predictions_err_as_they_are_told_to() -> None:
    from math import log

    for error in (0.3, 1.0):
        ratios = [log(predicted_tokens(100_000, error, seed=7, id=id) / 100_000) for id in range(4000)]
        assert fmean(ratios) == pytest.approx(0.0, abs=0.05)
        assert pstdev(ratios) == pytest.approx(error, rel=0.05)
    assert [predicted_tokens(n, 0.0, 7, n) for n in (1, 50, 999)] == [1, 50, 999]
    draws = [predicted_tokens(500, 0.5, seed, 3) for seed in range(20)]
    assert draws == [predicted_tokens(500, 0.5, seed, 3) for seed in range(20)]
    assert len(set(draws)) > 15
    assert min(predicted_tokens(1, 3.0, 0, id) for id in range(100)) == 1


@pytest.mark.parametrize("ageing_ns", [0, 7, 100])
def test_a_request_is_passed_only_by_those_it_must_wait_for(ageing_ns: int) -> None:
    """Two priorities, twice the load: who overtakes is at most that many steps of priority times the ageing later."""
    chance = random.Random(3)
    jobs = [job(id, 5 * id, 10, priority=chance.randrange(3)) for id in range(120)]
    order = list(admissions("priority-ageing", jobs, ageing_s=ageing_ns * 1e-9))
    places = {id: place for place, id in enumerate(order)}
    passed = 0
    for late, early in itertools.product(jobs, jobs):
        if early.arrival_ns < late.arrival_ns and places[late.id] < places[early.id]:
            passed += 1
            assert late.arrival_ns - early.arrival_ns <= (early.priority - late.priority) * ageing_ns
    assert (passed > 0) == (ageing_ns > 0)


def test_ageing_saves_whom_strict_priority_starves() -> None:
    jobs = [job(0, 0, 10), job(1, 1, 10, priority=4), *(job(id, 10 * id - 15, 10) for id in range(2, 80))]
    starved = admissions("vllm", jobs, policy="priority")
    aged = admissions("priority-ageing", jobs, ageing_s=50e-9)
    assert list(starved)[-1] == 1
    assert aged[1] <= 1 + 4 * 50 + 2 * 10  # arrival, the most it lets pass, the one then running
    assert sorted(aged) == sorted(starved)


def feasible(jobs: list[tuple[int, int]]) -> bool:
    """Return whether unit jobs (arrival, deadline) can all begin before their deadlines (Hall's condition)."""
    return all(
        sum(a <= arrival and deadline <= d for arrival, deadline in jobs) <= d - a
        for a, _ in jobs
        for _, d in jobs
        if d > a
    )


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from([2, 4, 8])), min_size=2, max_size=10))
def test_edf_meets_every_deadline_that_any_order_could(drawn: list[tuple[int, int]]) -> None:
    drawn.sort()
    jobs = [job(id, arrival, 1, slo_class=str(bound)) for id, (arrival, bound) in enumerate(drawn)]
    begun = admissions("edf", jobs, edf_ttft_ms={str(n): n * 1e-6 for n in (2, 4, 8)})
    met = all(begun[id] < arrival + bound for id, (arrival, bound) in enumerate(drawn))
    assert met == feasible([(arrival, arrival + bound) for arrival, bound in drawn])


def test_fcfs_misses_deadlines_that_edf_meets() -> None:
    jobs = [*(job(id, 0, 1, slo_class="batch") for id in range(5)), job(5, 0, 1, slo_class="chat")]
    bounds = {"edf_ttft_ms": {"chat": 2e-6, "batch": 8e-6}}
    assert admissions("vllm", jobs)[5] == 5
    assert admissions("edf", jobs, **bounds)[5] == 0
    unnamed = [replace(jobs[5], slo_class=""), *jobs[:5]]
    assert list(admissions("edf", unnamed, **bounds))[-1] == 5  # as lax as the laxest class


# fair


def service(requests: Iterable[Request]) -> Counter[str]:
    """Return the weighted tokens of each tenant, recounted: prompts once admitted, outputs once planned."""
    counted: Counter[str] = Counter()
    for r in requests:
        admitted = r.first_hit is not None
        outputs = r.outputs + r.placeholders + (1 if r.stale and r.known < r.max_len else 0)
        counted[r.arrived.tenant] += admitted * r.prompt_len + 2 * outputs
    return counted


@SOME
@given(SEEDS)
def test_counters_are_the_service_of_each_tenant(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = FairScheduler(tight(chance), shares_prefixes=False)
    lifted: Counter[str] = Counter()
    lift = scheduler.counters.lift

    def counting(tenant: str, to: int) -> None:
        before = scheduler.counters.service_of(tenant)
        lift(tenant, to)
        lifted[tenant] += scheduler.counters.service_of(tenant) - before

    scheduler.counters.lift = counting  # type: ignore[method-assign]
    everyone: dict[int, Request] = {}

    def look(plan: StepPlan) -> None:
        everyone.update(scheduler.requests)
        served = service(everyone.values()) + lifted
        assert {tenant: scheduler.counters.service_of(tenant) for tenant in served} == dict(served)

    drive(scheduler, traffic(chance, 20), look=look)
    assert sum(service(everyone.values()).values()) == sum(r.prompt_len + 2 * r.outputs for r in everyone.values())


def most_apart(policy: str, config: SchedulerConfig, requests: list[WorkloadRequest]) -> int:
    """Return the largest change of two tenants' difference in service while both had requests waiting."""
    scheduler = find_policy(policy)(config, shares_prefixes=False)
    everyone: dict[int, Request] = {}
    since: dict[tuple[str, str], tuple[int, int]] = {}  # range of the lead while both wait
    worst = 0

    def look(plan: StepPlan) -> None:
        nonlocal worst
        everyone.update(scheduler.requests)
        served = service(everyone.values())
        backlogged = {request.arrived.tenant for request in scheduler.waiting}
        for pair in itertools.combinations("abcd", 2):
            if not backlogged.issuperset(pair):
                since.pop(pair, None)
                continue
            ahead = served[pair[0]] - served[pair[1]]
            least, most = since.get(pair, (ahead, ahead))
            since[pair] = min(least, ahead), max(most, ahead)
            worst = max(worst, since[pair][1] - since[pair][0])

    drive(scheduler, requests, look=look)
    return worst


def vtc_bound(config: SchedulerConfig, prompt_len: int, output_len: int) -> int:
    """Return the bound of Sheng et al., theorem 4.4, over KV capacity or what running requests can still get.

    The smaller of the two counts. An admitted tenant had the smallest counter. Until it is admitted again, it gains no
    more than its prompt and the outputs of its running requests.
    """
    capacity = (config.num_blocks - 1) * config.block_size
    seats = config.max_num_seqs
    return 2 * min(max(prompt_len, 2 * capacity), prompt_len + 2 * seats * output_len)


@FEW
@given(SEEDS)
def test_backlogged_tenants_are_served_alike(seed: int) -> None:
    chance = random.Random(seed)
    config = tight(chance)
    apart = most_apart("fair", config, traffic(chance, 60))
    assert apart <= vtc_bound(config, 60, 67)


def greedy(light: int = 12) -> list[WorkloadRequest]:
    """Return two hundred requests of tenant a at once, and a few each of tenants b to d just after."""
    others = [WorkloadRequest(200 + i, 1, (("", 30),), 20, tenant="bcd"[i % 3]) for i in range(3 * light)]
    return [*(WorkloadRequest(i, 0, (("", 30),), 20, tenant="a") for i in range(200)), *others]


def test_first_come_first_served_has_no_such_bound() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=400)
    bound = vtc_bound(config, 30, 20)
    assert most_apart("vllm", config, greedy()) > 10 * bound
    assert most_apart("fair", config, greedy()) <= bound


def test_idling_saves_up_no_service() -> None:
    """b comes late: it shares from then on, and is not paid for the time before."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128, num_blocks=400)
    jobs = [job(id, 0, 10, tenant="a") for id in range(40)]
    late = [job(id, 200, 10, tenant="b") for id in range(40, 60)]
    scheduler = FairScheduler(config, shares_prefixes=False)
    order: list[str] = []

    def look(plan: StepPlan) -> None:
        order.extend(request.arrived.tenant for request in plan.admitted)

    drive(scheduler, [*jobs, *late], look=look)
    shared = order[order.index("b") :]
    assert shared == (["b", "a"] * 20)[: len(shared)]
    assert len(shared) in (39, 40)


def test_a_leap_ends_where_the_next_tenant_would_come_first() -> None:
    """Two of b and one of a decode, nobody else fits: b's counter, the smaller one, catches up with a's."""
    scheduler = FairScheduler(SchedulerConfig(max_model_len=64, num_blocks=11, block_size=16), shares_prefixes=False)
    for id, tenant in enumerate("abbab"):
        scheduler.add(WorkloadRequest(id, 0, (("", 33 if id < 3 else 50),), 14, tenant=tenant))
    scheduler.counters.charge("a", 50)
    while not (steps := scheduler.steady_steps()):
        scheduler.commit(scheduler.schedule())
    heads = []
    for _ in range(steps + 1):
        plan = scheduler.schedule()
        assert not plan.admitted
        heads.append(next(iter(scheduler.waiting)).arrived.tenant)
        scheduler.commit(plan)
    assert steps > 1
    assert heads == ["b"] * steps + ["a"]


@pytest.mark.parametrize(
    ("tokens", "index"), [([30, 30, 30], 1.0), ([50, 0, 0], 1 / 3), ([10, 20, 30], 36 / 42), ([0, 0, 0], None)]
)
def test_jains_index_by_hand(tokens: list[int], index: float | None) -> None:
    """What finishes after the last arrival does not count."""
    early = [finished(0, 1, 2, 3, n, prompt_tokens=0, tenant=t) for t, n in zip("abc", tokens, strict=True) if n]
    late = [finished(10, 11, 12, 13, 99, prompt_tokens=5, tenant=tenant) for tenant in "abc"]
    assert RunMetrics(requests_table(early + late)).scalars()["jain_fairness"] == pytest.approx(index)
    assert RunMetrics(requests_table(early[:1])).scalars()["jain_fairness"] is None


# On both clocks

ENGINE = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 200, "num_blocks": 40, "block_size": 4}
SETTINGS = {
    "sarathi_token_budget": 24,
    "sjf_error": 0.5,
    "ageing_s": 0.01,
    "edf_ttft_ms": {"chat": 20.0, "batch": 200.0},
    "scheduler_reserve_full_isl": False,
}


def engine_traffic(seed: int) -> Workload:
    """Return thirty requests within a tenth of a second, far more than the engine can run at once."""
    chance = random.Random(seed)
    requests = traffic(chance, 30)
    return Workload([replace(r, arrival_ns=r.arrival_ns * 100_000, output_len=1 + r.output_len // 3) for r in requests])


@pytest.mark.engine
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("policy", NEW)
def test_a_run_of_the_engine_is_reproduced(policy, overlapped, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files
    from tokentwin.realengine.replay import record

    config = SchedulerConfig(**{**ENGINE, **SETTINGS, "async_scheduling": overlapped})
    deployment = Deployment(model="random:llama", dtype="float32", policy=policy, scheduler=config)
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    record(engine_traffic(1), engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == 30
    assert sum(recording.steps["preempted"].to_pylist()) > 0
    vllm = deployment.model_copy(update={"policy": "vllm"})
    monkeypatch.setattr(decision_replay, "recorded_deployment", lambda _: vllm)
    assert not replay_decisions(recording).exact, "this traffic should tell the policy from vllm"


@pytest.mark.engine
def test_a_padded_run_of_the_engine_is_reproduced_and_its_steps_computed_the_padding(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files
    from tokentwin.realengine.replay import record

    config = SchedulerConfig(**{**ENGINE, "num_blocks": 400, "max_num_seqs": 8, "static_timeout_ms": 20})
    deployment = Deployment(model="random:llama", dtype="float32", policy="static", scheduler=config)
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    packed: list[int] = []
    launch = engine.runner.launch

    def counted(step: Any) -> Any:
        packed.extend([int(step.layout.tokens)] * bool(engine.scheduler.requests))  # not the canary's
        return launch(step)

    engine.runner.launch = counted  # type: ignore[method-assign]
    record(engine_traffic(1), engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    steps = recording.steps.to_pylist()
    computed = [step["prefill_tokens"] + step["decode_rows"] for step in steps]
    assert all(there >= tokens for there, tokens in zip(packed, computed, strict=True))
    assert sum(computed) > sum(sum(step["row_tokens"]) for step in steps)


# A policy of one's own, and settings that are wrong


def test_a_policy_of_ones_own_is_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text(
        "from tokentwin.serving.policies.ranked import RankedScheduler\n\n\n"
        "class ShortestPrompt(RankedScheduler):\n"
        "    def score(self, request):\n"
        "        return request.prompt_len\n\n\n"
        "class Broken(ShortestPrompt):\n"
        "    def __init__(self, config, **more):\n"
        "        self.table = {}['weights']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    jobs = [WorkloadRequest(id, 0, (("", tokens),), 3) for id, tokens in enumerate([9, 3, 6])]
    assert list(admissions("my_policies:ShortestPrompt", jobs)) == [1, 2, 0]
    with pytest.raises(UserError, match=r"policy: .*my_policies:Broken.* cannot be made: KeyError") as caught:
        Cluster(Deployment(policy="my_policies:Broken"), TokenCost(1, 1, 1), TableSink())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("edf_ttft_ms", {"chat": 0}),
        ("edf_ttft_ms", {"chat": float("nan")}),
        ("sjf_error", -0.1),
        ("ageing_s", -1),
        ("fair_output_weight", 0.5),
        ("sarathi_token_budget", -1),
        ("priority_scheduling_preemption_threshold", 0),  # without priorities
    ],
)
def test_settings_that_mean_nothing_are_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field) as caught:
        parse(SchedulerConfig, {field: value}, where="scheduler")
    assert "\n" not in str(caught.value)


def test_sglang_looks_for_requests_once_in_so_many_steps() -> None:
    """The second request comes beside decodes: its prompt runs when the poll is due, in a step of its own."""
    config = SchedulerConfig(scheduler_recv_interval=5, max_model_len=128)
    jobs = [WorkloadRequest(id, arrival, (("", 8),), 40) for id, arrival in enumerate([0, 3])]
    log: Any = decisions("sglang", config, jobs)
    steps = [rows for _, rows, _ in log]
    assert [rows for rows in steps if any(tokens > 1 for _, tokens in rows)] == [[(0, 8)], [(1, 8)]]
    assert steps.index([(1, 8)]) == 1 + 5  # the first prompt, then five decodes until the poll
    at_once = config.model_copy(update={"scheduler_recv_interval": 1})
    assert decisions("sglang", at_once, jobs) == decisions("prefill-first", at_once, jobs)


def test_sglang_encodes_images_by_its_outline() -> None:
    deployment = Deployment(model="Qwen2.5-VL-7B", policy="sglang", multimodal=MultimodalConfig())
    scheduler = find_policy("sglang")(deployment.staged_settings, shares_prefixes=False)
    scheduler.add(WorkloadRequest(0, 0, (("", 500),), 4, items=(Item(10, 300, "picture", "image"),)))
    assert scheduler.schedule().encoded == {0: [0]}
    for more in ({"schedule_policy": "lpm"}, {"policy": "priority", "priority_scheduling_preemption_threshold": 3}):
        with pytest.raises(UserError, match="known only to SGLang's exact policy"):
            find_policy("sglang")(deployment.rescheduled(**more).staged_settings, shares_prefixes=False)


def test_sglang_keeps_nothing_of_requests_that_have_gone() -> None:
    """Requests end, and clients hang up while theirs wait, after a preemption as well, and while they run."""
    limits = {"max_num_seqs": 3, "max_model_len": 128, "num_blocks": 200, "priority_scheduling_preemption_threshold": 0}
    scheduler: Any = SglangScheduler(SchedulerConfig(policy="priority", **limits))
    gone = dict.fromkeys(("running", "waiting", "preempted"), 0)
    preempted: set[int] = set()
    for step in range(120):
        if step < 60:
            scheduler.add(WorkloadRequest(step, step, (("", 20),), 6, priority=step * 37 % 60))
        if step % 3 == 2 and (request := scheduler.requests.get(step // 2)):
            waits = "preempted" if request.id in preempted else "waiting"
            gone["running" if request.id in scheduler.running else waits] += 1
            scheduler.abort(request.id)
        plan = scheduler.schedule()
        preempted.update(request.id for request in plan.preempted)
        if plan.tokens:
            scheduler.commit(plan)
    assert all(gone.values()) and not scheduler.requests
    kept = scheduler._preemption
    for left in (scheduler.leaving, scheduler.running, kept._joined, kept._known, kept._cached):
        assert not left


def test_trtllm_never_splits_a_prompt_nor_preempts_and_holds_prompts_back() -> None:
    config = SchedulerConfig(max_num_batched_tokens=20, max_model_len=128, block_size=4, num_blocks=21)
    jobs = [WorkloadRequest(id, id, (("", 12),), 20) for id in range(6)]
    log: Any = decisions("trtllm", config, jobs)
    assert sum(tokens == 12 for _, rows, _ in log for _, tokens in rows) == 6
    assert not any(preempted for *_, preempted in log)
    assert max(len(rows) for _, rows, _ in log) == 2  # 8 blocks to come of each, 20 in all
    waits = config.model_copy(update={"batch_wait_timeout_iters": 4, "batch_wait_max_tokens_ratio": 1.0})
    waited: Any = decisions("trtllm", waits, jobs)
    second = next(now for now, rows, _ in waited if (1, 12) in rows)
    assert second == next(now for now, rows, _ in log if (1, 12) in rows) + 4
    balanced = config.model_copy(update={"attention_dp_timeout_iters": 4, "attention_dp_ranks": 8})
    roomy = balanced.model_copy(update={"max_num_batched_tokens": 60, "num_blocks": 90})
    together: Any = decisions("trtllm", roomy, jobs)
    prompts = [sum(tokens == 12 for _, tokens in rows) for _, rows, _ in together]
    assert max(prompts) == 3  # the harmonic number of 8 ranks is 2.7
    long = find_policy("trtllm")(config).add(WorkloadRequest(0, 0, (("", 30),), 2))
    assert "exceed max_num_batched_tokens 20" in long.reason
