"""Leaps over runs of decode steps are a shortcut and nothing else: the same run to the bit as step by step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, Roofline
from tests.calibration.step_model_samples import deployment as step_model_deployment
from tokentwin.calibration.steps.correction import ADDED, Correction
from tokentwin.calibration.steps.features import CPU_FEATURES, STEP_FEATURES
from tokentwin.calibration.steps.observed import ObservedPrices
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.scheduler import POLICIES as EVERY_POLICY
from tokentwin.serving.scheduler import find_policy
from tokentwin.serving.step_prices import DecodeRun
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.router import find_router
from tokentwin.sim.run_log import TableSink

POLICIES = ("vllm", "static", "prefill-first", "sglang", "trtllm")
OF_ENGINES = {
    "sglang": {"scheduler_recv_interval": 7},
    "trtllm": {"batch_wait_timeout_iters": 5, "batch_wait_max_tokens_ratio": 0.5},
}
RARER = {
    "prefill_schedule_interval": 7, "max_num_active_seqs": 2, "max_num_scheduled_tokens": 15,
    "long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True,
}  # fmt: skip
SHORT = examples(0.3)


def requests(seed, count, rate_per_s=20.0, priorities=1):
    """Poisson arrivals, lognormal prompts, exponential outputs; nothing shared."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate_per_s, count)).astype(int).tolist()
    prompts = np.clip(rng.lognormal(4.5, 1.0, count), 1, 700).astype(int).tolist()
    outputs = np.clip(rng.exponential(50, count), 1, 300).astype(int).tolist()
    ranks = rng.integers(priorities, size=count).tolist()
    return [
        WorkloadRequest(i, arrivals[i], (("", prompts[i]),), outputs[i], priority=ranks[i], tenant=f"t{i % 3}")
        for i in range(count)
    ]


def step_cost(seed):
    """Return a calibration with arbitrary prices and a domain that some steps are outside of."""
    rng = np.random.default_rng(seed)
    nothing = dict.fromkeys(("id", "deployment", "version", "created"), "")

    def prices(features):
        return dict(zip(features, rng.integers(1, 10**8, len(features)).tolist(), strict=True))

    return StepCost(
        Calibration(
            **nothing,
            hardware={},
            step_prices_ps=prices(STEP_FEATURES),
            cpu_prices_ps=prices(CPU_FEATURES),
            domain={"decode": dict.fromkeys(STEP_FEATURES, (0, 10000)) | {"decode_context": (500, 4000)}},
            residuals={},
            noise={},
            fitted_steps=0,
        )
    )


def run(
    leaps, workload, cost, *, steps=False, replicas=2, router="least-tokens", policy="vllm", queue="fcfs", **scheduler
):
    """Return what happened, the steps if they are kept, and the number of steps that were not leapt over."""
    sink = TableSink()
    cluster = Cluster(
        Deployment(policy=policy, scheduler=SchedulerConfig(policy=queue, **OF_ENGINES.get(policy, {}), **scheduler)),
        cost,
        sink,
        replicas=replicas,
        router=find_router(router),
        shares_prefixes=workload.shares_prefixes,
        steps=steps,
        tokens=True,
        block=64,
        leaps=True,
    )
    planned = 0

    def count(plan, end_ns):
        nonlocal planned
        planned += 1

    for replica in cluster.replicas:
        replica._leaps = leaps and replica._leaps
        replica.on_planned = count
    return cluster.run(workload), sink.requests, sink.steps, planned


def assert_same(workload, cost, **settings):
    """Assert that leaping and stepping give one result, and that some steps were leapt over."""
    simulated, leapt, _, few = run(True, workload, cost(), **settings)
    stepped_simulated, stepped, steps, many = run(False, workload, cost(), steps=True, **settings)
    assert simulated == stepped_simulated
    assert leapt.equals(stepped)
    kept_simulated, kept, leapt_steps, _ = run(True, workload, cost(), steps=True, **settings)
    assert (kept_simulated, kept) == (simulated, leapt)
    assert leapt_steps.equals(steps)
    assert leapt["token_times_ns"].null_count == leapt["status"].to_pylist().count("rejected")
    # Steps with padding are not leapt over, nor runs of which nearly all is too long to run.
    assert few < many or many < 9 or settings.get("policy") == "static"
    return leapt


ROOMY = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
TIGHT = {"num_blocks": 70, "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 1024}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheduler", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    ("concurrency", "overlapped", "plan_ns"),
    [(None, False, 1_000), (24, True, 1_000), (None, True, 6_500_000)],
    ids=["plain", "overlapped, closed", "by the CPU"],
)
def test_leaping_is_stepping(policy, scheduler, concurrency, overlapped, plan_ns):
    def cost():
        return TokenCost(6_000_000, 18_000, 450, plan_ns=plan_ns)

    workload = Workload(requests(1, 130, 60.0), concurrency=concurrency, shares_prefixes=False)
    table = assert_same(workload, cost, policy=policy, async_scheduling=overlapped, **scheduler)
    preempted = sum(table["preemptions"].to_pylist())
    assert (preempted > 0) == (scheduler is TIGHT and policy not in ("static", "trtllm", "sglang"))


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("size", [1, 16])
def test_leaping_is_stepping_while_urgent_requests_preempt_others(size, overlapped):
    """With `sglang` a step is pure if the first waiting request may preempt nobody."""
    workload = Workload(conversations(requests(2, 50, 30.0, priorities=3)))
    seats = {"max_num_seqs": 2, "block_size": size, "num_blocks": 1 + 4096 // size, "async_scheduling": overlapped}
    limits = {**ROOMY, **seats, "priority_scheduling_preemption_threshold": 0}
    cost = TokenCost(6_000_000, 18_000, 450)
    table = assert_same(workload, lambda: cost, policy="sglang", queue="priority", **limits)
    assert sum(table["preemptions"].to_pylist()) > 0


def conversations(offered):
    """Return requests of which two in three continue another's prompt and answer, which may not be there yet."""
    turns = list(offered)
    for id, request in enumerate(turns):
        if id % 3:
            before = turns[id - 1 - id % 2]
            prompt = (*before.prompt, (f"out:{before.id}", before.output_len), (f"u{id}", 1 + id % 7))
        else:
            prompt = (("sys", 40), (f"u{id}", request.prompt_len))
        if sum(tokens for _, tokens in prompt) + request.output_len <= 1024:
            turns[id] = replace(request, prompt=prompt)
    return turns


@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from([2.0, 12.0, 60.0]),
    policy=st.sampled_from(sorted(EVERY_POLICY)),
    concurrency=st.sampled_from([None, 1, 7]),
    blocks=st.integers(64, 200),
    seqs=st.integers(2, 40),
    budget=st.sampled_from([16, 64, 300, 1024]),
    block_size=st.sampled_from([1, 16, 24]),
    queue=st.sampled_from(["fcfs", "priority"]),
    calibrated=st.booleans(),
    overlapped=st.booleans(),
    shared=st.booleans(),
    windows=st.sampled_from([(), (5,), (40, 0), (300, 300, 0)]),
    compiles=st.booleans(),
    stops=st.booleans(),
    rarer=st.sampled_from([{}, {}, {"prefill_schedule_interval": 3}, {"prefill_schedule_interval": 40}, RARER]),
)
@SHORT
def test_leaping_is_stepping_whatever_the_settings(
    seed,
    rate,
    policy,
    concurrency,
    blocks,
    seqs,
    budget,
    block_size,
    queue,
    calibrated,
    overlapped,
    shared,
    windows,
    compiles,
    stops,
    rarer,
):
    def cost():
        return step_cost(seed) if calibrated else TokenCost(3_000_000, 9_000, 999, plan_ns=seed % 5_000)

    offered = requests(seed, 60, rate, priorities=3)
    if compiles:
        offered = [replace(one, grammar_compile_ns=(one.id * seed) % 400_000_000) for one in offered]
    if stops:
        offered = [replace(one, max_tokens=one.output_len + (one.id * seed) % 3) for one in offered]
    workload = Workload(conversations(offered) if shared else offered, concurrency=concurrency, shares_prefixes=shared)
    assert_same(
        workload,
        cost,
        policy=policy,
        num_blocks=blocks * 16 // block_size * max(len(windows), 1),
        kv_groups=windows,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=1024,
        block_size=block_size,
        queue=queue,
        async_scheduling=overlapped,
        **({"edf_ttft_ms": {"": 500.0}} if policy == "edf" else {}),
        **rarer,
    )


def test_an_arrival_cuts_a_leap_at_the_end_of_the_running_step():
    def cost():
        return TokenCost(10_000_000, 0, 0)

    for arrival_ns in (49_999_999, 50_000_000, 50_000_001):
        first = WorkloadRequest(0, 0, (("", 4),), 30)
        second = WorkloadRequest(1, arrival_ns, (("", 4),), 30)
        table = assert_same(Workload([first, second], shares_prefixes=False), cost, replicas=1, **ROOMY)
        scheduled = {row["request_id"]: row["scheduled_ns"] for row in table.to_pylist()}
        assert scheduled[1] == (50_000_000 if arrival_ns <= 50_000_000 else 60_000_000)


def test_an_arrival_in_a_leap_of_the_overlapped_loop_runs_behind_the_step_that_is_planned_already():
    def cost():
        return TokenCost(10_000_000, 0, 0, plan_ns=1_000_000)

    for arrival_ns in (40_999_999, 41_000_000, 41_000_001):
        first = WorkloadRequest(0, 0, (("", 4),), 30)
        second = WorkloadRequest(1, arrival_ns, (("", 4),), 30)
        table = assert_same(
            Workload([first, second], shares_prefixes=False), cost, replicas=1, async_scheduling=True, **ROOMY
        )
        scheduled = {row["request_id"]: row["scheduled_ns"] for row in table.to_pylist()}
        assert scheduled[1] == (51_000_000 if arrival_ns <= 41_000_000 else 61_000_000)


def test_kept_steps_never_leap():
    deployment = Deployment(scheduler=SchedulerConfig(**ROOMY))
    cluster = Cluster(deployment, TokenCost(6_000_000, 18_000, 450), TableSink(), steps=True)
    assert not cluster.replicas[0]._leaps


def cost_of(kind, seed):
    if kind == "token":
        return TokenCost(6_000_000, 18_001, 457, plan_ns=12_345)
    if kind == "calibrated":
        return step_cost(seed)
    correction = Correction(added_ns=dict.fromkeys(ADDED, 1234.5 * (seed + 1)))
    return OperationCost(LLAMA, step_model_deployment(), Roofline(), correction, HostTimes(1e5 * seed, 777.7))


@pytest.mark.parametrize("kind", ["token", "calibrated", "operations"])
@pytest.mark.parametrize("seed", range(4))
def test_decode_run_ns_is_cpu_ns_plus_step_ns_step_by_step(kind, seed):
    cost = cost_of(kind, seed)
    policy = find_policy("vllm")
    scheduler = policy(SchedulerConfig(**ROOMY), shares_prefixes=False)
    for request in requests(seed, 3 + 9 * seed):
        scheduler.add(request)
    runs = 0
    while scheduler.requests:
        steps = scheduler.steady_steps()
        if not steps:
            scheduler.commit(scheduler.schedule())
            continue
        runs += 1
        decodes = scheduler.decodes
        run = cost.decode_run_ns(len(decodes), decodes.context, decodes.squares, steps)
        assert isinstance(run, DecodeRun)  # which no leap goes through step by step
        ahead = list(run)
        one_by_one = []
        for _ in range(steps):
            plan = scheduler.schedule()
            assert not plan.listed and not plan.admitted and not plan.preempted
            one_by_one.append(cost.cpu_ns(plan) + cost.step_ns(plan))
            scheduler.commit(plan)
        assert ahead == one_by_one
    assert runs > 2


def test_a_leap_counts_the_steps_outside_the_calibrated_domain_as_stepping_does():
    workload = Workload(requests(5, 80), shares_prefixes=False)
    leaping, stepping = ObservedPrices(step_cost(5)), ObservedPrices(step_cost(5))
    run(True, workload, leaping, replicas=1, **ROOMY)
    run(False, workload, stepping, replicas=1, **ROOMY)
    assert 0 < stepping.extrapolated_share < 1
    assert leaping.extrapolated_share == pytest.approx(stepping.extrapolated_share, abs=0.05)


@pytest.mark.parametrize(("max_tokens", "steps"), [(None, 3), (10, 4)])
def test_a_step_in_flight_when_the_last_request_ends_is_recorded(max_tokens, steps):
    """In the overlapped loop it was planned behind a stop token, and runs for nothing."""
    sink = TableSink()
    deployment = Deployment(scheduler=SchedulerConfig(async_scheduling=True))
    one = WorkloadRequest(0, 0, (("", 20),), 3, max_tokens=max_tokens)
    Cluster(deployment, TokenCost(1_000_000, 9_000, 999), sink, tokens=True).run(Workload([one]))
    assert sink.steps["row_ids"].to_pylist() == [[0]] * steps
    assert sink.requests["output_tokens"].to_pylist() == [3]
