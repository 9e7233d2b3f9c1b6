"""Speculative decoding: what is accepted, what the scheduler grants, what comes out, and when."""

import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.budget import examples
from tests.serving.test_scheduler_properties import at_once
from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.draft_cost import StatedDraft
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import POLICIES, find_policy
from tokentwin.serving.speculative import Coins, SpeculativeConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics

MS = 1_000_000


def speculative(k: int = 3, rate: float | None = 0.7, method: str = "ngram", **more) -> SpeculativeConfig:
    return SpeculativeConfig(num_speculative_tokens=k, acceptance_rate=rate, method=method, draft_us=0, **more)


def simulated(requests, config, cost, *, policy="vllm", tokens=True):
    sink = TableSink()
    deployment = Deployment(policy=policy, scheduler=config)
    done = Cluster(deployment, cost, sink, shares_prefixes=False, tokens=tokens).run(
        Workload(requests, shares_prefixes=False)
    )
    return done, sink


def arriving(count, seed=0, rate_per_s=40.0, longest=120):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate_per_s, count)).astype(int).tolist()
    sizes = rng.integers(1, longest, (count, 2)).tolist()
    return [WorkloadRequest(i, t, (("", p),), o) for i, (t, (p, o)) in enumerate(zip(arrivals, sizes, strict=True))]


def test_large_steps_draft_fewer_tokens():
    """Two requests draft 3 tokens, three draft 1, and six draft none: each gets its 12 tokens in so many steps."""
    config = speculative(3, 1.0, num_speculative_tokens_per_batch_size=((1, 2, 3), (3, 4, 1), (6, 8, 0)))
    assert [config.drafted_by(requests) for requests in (1, 2, 3, 4, 5, 6, 8, 100)] == [3, 3, 1, 1, 1, 0, 0, 0]
    for count, tokens in ((2, 4), (3, 2), (6, 1)):
        settings = SchedulerConfig(speculative=config, max_num_seqs=8)
        done, _ = simulated(
            [WorkloadRequest(i, 0, (("", 5),), 13) for i in range(count)], settings, TokenCost(MS, 0, 0)
        )
        assert done.steps == 1 + 12 // tokens
    for wrong in (((2, 4, 1),), ((1, 4, 1), (4, 8, 0)), ((1, 4, -1),)):
        with pytest.raises(ValidationError, match="ranges in order"):
            speculative(3, num_speculative_tokens_per_batch_size=wrong)


def test_a_step_that_drafts_less_makes_fewer_passes():
    config = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=4,
        draft_us=100,
        num_speculative_tokens_per_batch_size=((1, 1, 4), (2, 2, 2), (3, 9, 0)),
    )
    rows = np.array([1, 2, 5])
    sizes = StepSizes(decode_rows=rows, sampled_rows=rows)
    assert StatedDraft(config).ns(sizes, np.zeros(3)).tolist() == [400_000, 200_000, 100_000]


# Acceptance


def tossed(acceptance: Coins, request: int, place: int, drafts: int) -> int:
    """Return how many of `drafts` are accepted after `place` output tokens."""
    return acceptance.tossed(Request(WorkloadRequest(request, 0, (("", 1),), place + drafts), place), drafts)


def test_rates_as_vllm_counts_them_are_cumulative():
    config = speculative(3, None, synthetic_acceptance_rates=(0.8, 0.6, 0.3))
    assert config.conditional_rates == pytest.approx((0.8, 0.75, 0.5))
    assert speculative(2, None, synthetic_acceptance_rates=(0.0, 0.0)).conditional_rates == (0.0, 0.0)


@pytest.mark.parametrize(
    "config",
    [
        speculative(4, 0.7),
        speculative(4, 0.7, seed=12345),
        speculative(3, None, synthetic_acceptance_rates=(0.9, 0.5, 0.4)),
        speculative(3, 1.0),
        speculative(3, 0.0),
    ],
)
def test_tokens_of_a_step_have_their_mean_and_their_distribution(config):
    k, n = config.num_speculative_tokens, 20_000
    acceptance = Coins(config)
    counts = Counter(tossed(acceptance, i, 7 * i, k) for i in range(n))
    reached = np.array([sum(counts[a] for a in range(place, k + 1)) for place in range(1, k + 1)]) / n
    expected = np.cumprod(config.conditional_rates)
    assert np.all(np.abs(reached - expected) <= 4 * np.sqrt(expected * (1 - expected) / n))


def test_a_coin_belongs_to_a_place_and_not_to_the_draft_that_reaches_it():
    acceptance = Coins(speculative(4, 0.5))
    for request in range(200):
        coins = [tossed(acceptance, request, place, 1) for place in range(12)]
        for place in range(8):
            run = next((length for length in range(4) if not coins[place + length]), 4)
            assert [tossed(acceptance, request, place, drafts) for drafts in range(5)] == [
                min(run, d) for d in range(5)
            ]


def test_seeds_and_requests_have_luck_of_their_own():
    def luck(seed, request):
        acceptance = Coins(speculative(1, 0.5, seed=seed))
        return [tossed(acceptance, request, place, 1) for place in range(64)]

    assert luck(0, 1) == luck(0, 1)
    assert len({tuple(luck(seed, request)) for seed in (-1, 0, 1) for request in (1, 2, 11)}) == 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"acceptance_rate": 0.5, "synthetic_acceptance_rates": (0.5, 0.4, 0.3)},
        {"acceptance_rate": 1.5},
        {"synthetic_acceptance_rates": (0.5, 0.4)},
        {"synthetic_acceptance_rates": (0.5, 0.6, 0.3)},
        {"acceptance_rate": 0.5, "method": "draft_model", "draft_us": None},
        {"acceptance_rate": 0.5, "method": "draft_model", "model": "m", "draft_us": 3},
        {"proposal_rates": (0.5, 0.6, 0.3)},
        {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
        {"method": "eagle", "prompt_lookup_max": 3},
        {"acceptance_rate": 0.5, "method": "eagle", "draft_us": 1, "draft_step_share": 0.1},
        {"acceptance_rate": 0.5, "method": "ngram", "draft_us": 1, "model": "m"},
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(wrong):
    with pytest.raises(ValidationError):
        SpeculativeConfig(num_speculative_tokens=3, **{"method": "ngram", "draft_us": 0.0, **wrong})


# What the scheduler grants


def decoded(config: SchedulerConfig, arrived: WorkloadRequest, policy: str = "vllm") -> list[list[tuple[int, int]]]:
    """Return each step's (tokens, drafts) of a request that is alone."""
    scheduler = find_policy(policy)(at_once(config), shares_prefixes=False)
    request = scheduler.add(arrived)
    steps = []
    while not request.ended:
        plan = scheduler.schedule()
        steps.append([(row.tokens, row.drafts) for row in plan.rows()])
        scheduler.commit(plan)
        request.check()
    assert request.outputs == arrived.output_len
    return steps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sure_draft_takes_the_output_in_runs_and_what_lies_beyond_is_computed_too(policy):
    config = SchedulerConfig(speculative=speculative(3, 1.0))
    steps = decoded(config, WorkloadRequest(0, 0, (("", 10),), 12), policy)
    assert steps == [[(10, 0)], [(4, 3)], [(4, 3)], [(4, 3)]]


@pytest.mark.parametrize("output", range(1, 14))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_sure_drafts_take_as_many_steps_as_division_says(k, output):
    steps = decoded(SchedulerConfig(speculative=speculative(k, 1.0)), WorkloadRequest(0, 0, (("", 9),), output))
    assert len(steps) == 1 + -(-(output - 1) // (k + 1))


@pytest.mark.parametrize("scheduled", [None, 200])
def test_a_prompt_that_no_step_has_room_for_is_split_in_the_end(scheduled):
    """TensorRT-LLM's policy splits no prompt, but drafts or `max_num_scheduled_tokens` leave no room for all 300."""
    limits = {"max_num_batched_tokens": 300, "max_num_scheduled_tokens": scheduled, "max_num_seqs": 4}
    drafts = SpeculativeConfig(method="draft_model", model="Qwen3-0.6B", num_speculative_tokens=1, acceptance_rate=0.5)
    config = SchedulerConfig(**limits, max_model_len=600, num_blocks=200, speculative=drafts)
    offered = [WorkloadRequest(0, 0, (("", 300),), 4)]
    sink = TableSink()
    Cluster(Deployment(policy="trtllm", scheduler=config), TokenCost(6_000_000, 0, 0), sink).run(Workload(offered))
    assert sink.requests["status"].to_pylist() == ["finished"]


def test_a_hopeless_draft_gives_one_token_a_step():
    steps = decoded(SchedulerConfig(speculative=speculative(3, 0.0)), WorkloadRequest(0, 0, (("", 10),), 6))
    assert steps == [[(10, 0)], *[[(4, 3)]] * 5]


def test_budget_and_threshold_cut_drafts_first():
    one = {"speculative": speculative(3, 1.0), "max_num_batched_tokens": 2}
    assert decoded(SchedulerConfig(**one), WorkloadRequest(0, 0, (("", 2),), 6)) == [
        [(2, 0)],
        [(2, 1)],
        [(2, 1)],
        [(2, 1)],
    ]


def test_drafts_end_before_the_last_position():
    """Of the longest request there can be, the last token is never computed, nor is a draft in its place."""
    config = SchedulerConfig(speculative=speculative(5, 1.0), max_model_len=20)
    assert decoded(config, WorkloadRequest(0, 0, (("", 10),), 10)) == [[(10, 0)], [(6, 5)], [(3, 2)]]


@pytest.mark.parametrize("running", [False, True])
def test_who_decodes_when_admitted_is_padded_unless_prompts_are_under_way(running):
    """All of a prompt but its last token is cached: vLLM verifies drafts all the same, so that rows are alike."""
    config = SchedulerConfig(speculative=speculative(3, 0.0), block_size=4, max_num_batched_tokens=8)
    scheduler = find_policy("vllm")(config)
    scheduler.add(WorkloadRequest(0, 0, (("shared", 4), ("", 1)), 2))
    while scheduler.requests:
        scheduler.commit(scheduler.schedule())
    if running:
        scheduler.add(WorkloadRequest(1, 0, (("", 12),), 2))
        scheduler.commit(scheduler.schedule())
    scheduler.add(WorkloadRequest(2, 0, (("shared", 4), ("", 1)), 2))
    (row,) = (row for row in scheduler.schedule().rows() if row.request.id == 2)
    assert (row.tokens, row.drafts) == ((1, 0) if running else (4, 3))


@pytest.mark.parametrize(("method", "first", "held"), [("ngram", 2, 3), ("eagle", 3, 4)])
def test_a_draft_that_writes_kv_needs_blocks_ahead(method, first, held):
    config = SchedulerConfig(block_size=4, speculative=speculative(3, 0.0, method))
    scheduler = find_policy("vllm")(config, shares_prefixes=False)
    request = scheduler.add(WorkloadRequest(0, 0, (("", 8),), 30))
    scheduler.commit(scheduler.schedule())
    assert request.block_count == first
    scheduler.commit(scheduler.schedule())  # computes 4 tokens more, then forgets 3
    assert (request.computed, request.known, request.block_count) == (9, 10, held)


# What comes out, and when


def outcome(sink, *columns):
    table = sink.requests.sort_by("request_id")
    return [tuple(row[name] for name in columns) for row in table.to_pylist()]


def test_a_hopeless_draft_costs_what_it_computes_and_nothing_else():
    """With free tokens, steps and times are those of the plain run; tokens to verify are all that is more."""
    requests = arriving(60)
    free = TokenCost(10 * MS, 0, 0)
    config = SchedulerConfig(max_num_seqs=8)
    hopeless = config.model_copy(update={"speculative": speculative(4, 0.0)})
    _, plain = simulated(requests, config, free)
    _, drafted = simulated(requests, hopeless, free)
    columns = ("request_id", "first_token_ns", "finish_ns", "output_tokens", "token_times_ns")
    assert outcome(drafted, *columns) == outcome(plain, *columns)
    for name in ("start_ns", "end_ns", "decode_rows", "decode_context", "prefill_tokens", "prefill_pairs"):
        assert drafted.steps[name] == plain.steps[name], name
    assert RunMetrics(drafted.requests).scalars()["acceptance_length"] == 1
    assert RunMetrics(plain.requests).scalars()["acceptance_length"] is None
    drafts = sum(4 * (request.output_len - 1) for request in requests)
    assert sum(filter(None, drafted.steps["draft_tokens"].to_pylist())) == drafts


def test_tokens_of_one_step_come_together_and_itl_counts_them_apart():
    request = WorkloadRequest(0, 0, (("", 10),), 12)
    _, sink = simulated([request], SchedulerConfig(speculative=speculative(3, 1.0)), TokenCost(10 * MS, 0, 0))
    assert outcome(sink, "token_times_ns") == [([n * MS for n in [10] + [20] * 4 + [30] * 4 + [40] * 3],)]
    metrics = RunMetrics(sink.requests, sink.steps)
    assert sorted(metrics.values("itl_ms")) == [0.0] * 8 + [10.0] * 3
    assert metrics.distribution("tpot_ms").mean == pytest.approx(30 / 11)
    assert metrics.values("batch_tokens").tolist() == [10, 4, 4, 4]
    assert metrics.scalars()["acceptance_length"] == 4
    assert (metrics.scalars()["draft_acceptance_rate"], metrics.scalars()["rejected_draft_tokens"]) == (1, 0)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_mean_of_tokens_in_a_step_is_the_closed_form(alpha):
    config = SchedulerConfig(max_num_seqs=64, speculative=speculative(4, alpha))
    requests = [WorkloadRequest(i, 0, (("", 8),), 1500) for i in range(40)]
    _, sink = simulated(requests, config, TokenCost(MS, 0, 0), tokens=False)
    found = RunMetrics(sink.requests).scalars()["acceptance_length"]
    rates = np.cumprod([alpha] * 4)
    mean = 1 + rates.sum()
    variance = (rates * (2 * np.arange(1, 5) - 1)).sum() - (mean - 1) ** 2
    assert abs(found - mean) <= 4 * np.sqrt(variance / sum(sink.requests["drafts"].to_pylist()))


def test_luck_does_not_depend_on_the_batch_or_the_policy():
    requests = arriving(80, rate_per_s=200)
    columns = ("request_id", "output_tokens", "drafts", "draft_tokens", "accepted_tokens")
    seen = set()
    for policy in POLICIES:
        for seqs in (3, 64):
            config = SchedulerConfig(max_num_seqs=seqs, speculative=speculative(3, 0.6, seed=5))
            _, sink = simulated(requests, config, TokenCost(3 * MS, 20_000, 100), policy=policy, tokens=False)
            seen.add(tuple(outcome(sink, *columns)))
    assert len(seen) == 1


class _Leviathan:
    """A cost in which a run of the target takes `target_ns`, whatever it computes, and drafting the configured time."""

    def __init__(self, target_ns: int, config: SpeculativeConfig | None) -> None:
        self.target_ns = target_ns
        self.draft = StatedDraft(config) if config else None

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        drafting = self.draft.ps(plan, 1000 * self.target_ns) // 1000 if self.draft else 0
        return self.target_ns + drafting

    def decode_run_ns(self, rows, context, squares, steps):
        return [self.target_ns] * steps


@pytest.mark.parametrize(("k", "alpha", "share"), [(3, 0.8, 0.05), (5, 0.6, 0.2), (2, 0.3, 0.5)])
def test_the_speed_up_is_leviathans(k, alpha, share):
    """Theorem 3.8: walltime improves by (1 - a^(k+1)) / ((1 - a) (k c + 1)), c the cost of a draft in target runs."""
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=k, acceptance_rate=alpha, draft_step_share=share)
    requests = [WorkloadRequest(i, 0, (("", 4),), 2000) for i in range(25)]
    times = {}
    for speculates in (None, config):
        _, sink = simulated(
            requests, SchedulerConfig(speculative=speculates), _Leviathan(10 * MS, speculates), tokens=False
        )
        times[speculates] = RunMetrics(sink.requests).distribution("decode_ms").mean
    expected = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * share + 1))
    assert times[None] / times[config] == pytest.approx(expected, rel=0.015)


# Whatever happens


@st.composite
def driven(draw: st.DrawFn) -> tuple[str, SchedulerConfig, bool, list[WorkloadRequest]]:
    """Run a policy under tight memory, in which its largest request always fits but hardly more."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    config = SchedulerConfig(
        max_num_seqs=draw(st.sampled_from([1, 3, 8])),
        max_num_batched_tokens=draw(st.sampled_from([1, 4, 16, 64])),
        max_model_len=64,
        block_size=size,
        num_blocks=1 + -(-64 // size) + draw(st.integers(0, 64 // size)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        forget_withdrawn=True,
        async_scheduling=draw(st.booleans()),
        speculative=speculative(
            draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 0.6, 1.0])), draw(st.sampled_from(["ngram", "eagle"]))
        ),
    )
    sizes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 2)), min_size=1, max_size=12)
    )
    shared = draw(st.booleans())
    requests = [
        WorkloadRequest(
            i, i, (("system", min(p, 8)), ("", p - min(p, 8))) if shared and p > 8 else (("", p),), o, urgency
        )
        for i, (p, o, urgency) in enumerate(sizes)
    ]
    return draw(st.sampled_from(sorted(POLICIES))), config, shared, requests


@examples(0.5)
@given(driven(), st.integers(0, 2**32))
def test_every_request_gets_its_output_once_under_preemption(given_run, seed):
    policy, config, shared, arriving = given_run
    chance = random.Random(seed)
    scheduler = find_policy(policy)(at_once(config), shares_prefixes=shared)
    depth = 2 if config.async_scheduling else 1
    flying: deque[StepPlan] = deque()
    to_come, requests = deque(arriving), []
    emitted: Counter[int] = Counter()
    for _ in range(20_000):
        while to_come and (chance.random() < 0.3 or not scheduler.requests):
            requests.append(scheduler.add(to_come.popleft()))
        while len(flying) < depth:
            plan = scheduler.schedule()
            _check_plan(plan, config)
            if not plan.tokens:
                break
            flying.append(plan)
        if flying:
            plan = flying.popleft()
            known = sum(request.known for request in requests)
            nobodys = sum(row.samples and row.request.ended for row in plan.rows())
            scheduler.commit(plan)
            _check_state(scheduler, config)
            fresh = sum(request.known for request in requests) - known
            assert fresh == plan.sampled_rows + plan.accepted_tokens - nobodys
            emitted[plan.seq] = fresh
        elif not scheduler.requests and not to_come:
            break
    assert not scheduler.requests
    assert scheduler.pool.free == scheduler.pool.total
    finished = [request for request in requests if request.status is Status.FINISHED]
    assert all(request.outputs == request.arrived.output_len for request in finished)
    steps = Counter(seq for request in requests for seq, _ in request.sampled_in)
    assert steps == emitted
    assert all(request.sampled_in == sorted(request.sampled_in) for request in requests)


def _check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    rows = plan.rows()
    computed = [*rows, *(row for row in plan.padding for _ in range(row.rows))]
    assert plan.tokens == sum(row.tokens for row in computed) <= config.max_num_batched_tokens
    assert plan.draft_tokens == sum(row.drafts for row in computed)
    assert plan.decode_rows == sum(row.tokens - row.drafts == 1 for row in computed)
    assert plan.decode_context == sum(row.start for row in computed if row.tokens - row.drafts == 1)
    assert plan.pairs == sum(row.start + i + 1 for row in computed for i in range(row.tokens))
    assert all(row.samples and row.drafts <= config.speculative.num_speculative_tokens for row in rows if row.drafts)


def _check_state(scheduler, config: SchedulerConfig) -> None:
    for request in scheduler.requests.values():
        request.check()
        beyond = config.speculative.num_speculative_tokens * (2 if config.async_scheduling else 1)
        assert request.known + request.placeholders <= request.max_len + beyond
    for request in scheduler.running.values():
        assert request.block_count * config.block_size >= request.computed
    scheduler.pool.check(scheduler.requests.values())
