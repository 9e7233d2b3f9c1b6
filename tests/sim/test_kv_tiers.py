"""KV tiers: what they hold, what loading costs, and that nobody is lost however little memory there is."""

from collections import OrderedDict
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.stand_in import StandIn
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.deployments.kv_tiers import KvTier, KvTiersConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.tiered_blocks import TieredCache
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.kv_tiers import FifoLink
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.metrics.run_metrics import RunMetrics

MS, S = 1_000_000, 1_000_000_000
GIB = 1024**3
STEP_NS, TOKEN_NS = 2 * MS, 50_000
COST = TokenCost(STEP_NS, TOKEN_NS, 0)
BLOCK, TOKEN_BYTES = 16, 100_000
INSTANT = 1e9
MOONCAKE = Path(__file__).parents[3] / "shared/data/mooncake/conversation_trace.jsonl"


def tier(name="cpu", blocks=10_000, read=10.0, write=INSTANT, latency_us=0.0, block=BLOCK):
    gib = (blocks + 0.5) * block * TOKEN_BYTES / GIB
    return KvTier(name=name, capacity_gib=gib, read_gb_s=read, write_gb_s=write, latency_us=latency_us)


class TieredRun:
    """One replica with tiers (or none); invariants are checked whenever it plans."""

    def __init__(self, requests, *tiers, policy="vllm", preemption="swap", order="fcfs", **scheduler):
        sizes = {"max_model_len": 4096, "max_num_batched_tokens": 8192, "block_size": BLOCK, "policy": order}
        given = KvTiersConfig(tiers=tiers, preemption=preemption, kv_bytes_per_token=TOKEN_BYTES) if tiers else None
        deployment = Deployment(policy=policy, scheduler=SchedulerConfig(**(sizes | scheduler)), kv_tiers=given)
        sink = TableSink()
        self.cluster = Cluster(deployment, COST, sink, steps=False)
        replica = self.cluster.replicas[0]
        self.scheduler = replica.scheduler
        replica._policy.scheduler = StandIn(self.scheduler, schedule=self._check_and_schedule)
        self.seen = {}
        self.cluster.run(Workload(requests))
        self.table = sink.requests.sort_by("request_id")
        self.rows = self.table.to_pylist()

    def _check_and_schedule(self):
        plan = self.scheduler.schedule()
        scheduler = self.scheduler
        for request in scheduler.requests.values():
            request.check()
        self.seen |= scheduler.requests
        scheduler.pool.check(self.seen.values())
        if scheduler.kv_loading is not None:
            scheduler.kv_loading.external.check()
        return plan

    def ttft_ns(self, id):
        return self.rows[id]["first_token_ns"] - self.rows[id]["arrival_ns"]

    @property
    def hits(self):
        """Return the prompt tokens that each request need not compute, from whichever tier."""
        return [
            row["prefix_hit_tokens"] + sum(tokens for _, tokens in row["tier_hit_tokens"] or ()) for row in self.rows
        ]


def in_turn(*prompts, output=1, every_ns=1 * S):
    return [WorkloadRequest(id, id * every_ns, prompt, output) for id, prompt in enumerate(prompts)]


A, B, C = (("a", 1600),), (("b", 1760),), (("c", 1760),)
A_AGAIN = (("a", 1600), ("z", 160))
SMALL = {"num_blocks": 111}  # one prompt of 1760 tokens, and nothing else
REST_NS = STEP_NS + 160 * TOKEN_NS
A_BYTES = 1600 * TOKEN_BYTES


# What loading costs


def test_a_second_turn_costs_its_load_and_the_step_of_the_rest():
    run = TieredRun(in_turn(A, B, A_AGAIN), tier(read=10.0, latency_us=30), **SMALL)
    assert run.rows[2]["prefix_hit_tokens"] == 0
    assert run.rows[2]["tier_hit_tokens"] == [("cpu", 1600)]
    assert run.ttft_ns(2) == 30_000 + A_BYTES // 10 + REST_NS
    assert run.rows[2]["scheduled_ns"] - run.rows[2]["arrival_ns"] == 30_000 + A_BYTES // 10


def test_without_tiers_it_is_computed_again():
    run = TieredRun(in_turn(A, B, A_AGAIN), **SMALL)
    assert run.rows[2]["tier_hit_tokens"] is None and run.rows[2]["swapped_in_tokens"] is None
    assert run.ttft_ns(2) == REST_NS + 1600 * TOKEN_NS
    assert RunMetrics(run.table).scalars()["tier_hit_rate"] is None


def test_what_the_first_tier_has_no_room_for_is_loaded_from_the_second():
    run = TieredRun(in_turn(A, B, A_AGAIN), tier(blocks=110), tier("disk", read=2.0, latency_us=100), **SMALL)
    assert run.rows[2]["tier_hit_tokens"] == [("disk", 1600)]
    assert run.ttft_ns(2) == 100_000 + A_BYTES // 2 + REST_NS
    metrics = RunMetrics(run.table)
    assert metrics.tier_hit_rates() == {"disk": pytest.approx(1600 / (1600 + 1760 + 1760))}
    assert metrics.scalars()["tier_hit_rate"] == pytest.approx(1600 / 5120)


def test_the_end_of_a_prefix_is_lost_first():
    run = TieredRun(in_turn(A, B, A_AGAIN), tier(blocks=110 + 50), **SMALL)
    assert run.rows[2]["tier_hit_tokens"] == [("cpu", 50 * BLOCK)]


def test_a_prefix_in_use_stays():
    """A tier forgets x, which came after a, because a came again."""
    prompts = (A, (("x", 320),), A, B, A_AGAIN, (("x", 336),))
    run = TieredRun(in_turn(*prompts), tier(blocks=110 + 100), num_blocks=122)
    assert run.hits == [0, 0, 1584, 0, 1600, 0]


def test_tiers_load_side_by_side():
    halves = [tier(blocks=160, read=10.0), tier("disk", read=2.0)]  # b, and the 50 first blocks of a
    run = TieredRun(in_turn(A, B, A_AGAIN), *halves, **SMALL)
    assert run.rows[2]["tier_hit_tokens"] == [("cpu", 800), ("disk", 800)]
    assert run.ttft_ns(2) == A_BYTES // 2 // 2 + REST_NS


def test_loads_take_turns_on_a_link():
    both = [WorkloadRequest(2 + id, 5 * S, (*prompt, ("z", 160)), 1) for id, prompt in enumerate((A, (("b", 1600),)))]
    first, second = in_turn(A, (("b", 1600),))
    run = TieredRun([first, second, WorkloadRequest(9, 4 * S, (("d", 3520),), 1), *both], tier(), num_blocks=221)
    assert [run.rows[id]["tier_hit_tokens"] for id in (2, 3)] == [[("cpu", 1600)]] * 2
    assert run.ttft_ns(2) == A_BYTES // 10 + REST_NS
    assert run.ttft_ns(3) == 2 * (A_BYTES // 10) + REST_NS


def test_others_run_while_a_request_loads():
    late = WorkloadRequest(3, 2 * S + 1, (("", 16),), 1)
    run = TieredRun([*in_turn(A, B, A_AGAIN), late], tier(read=0.1), num_blocks=113)
    assert run.ttft_ns(3) == STEP_NS + 16 * TOKEN_NS < 1 * S < run.ttft_ns(2)


def test_a_block_can_be_loaded_once_it_has_been_written():
    every_ns = 200 * MS
    run = TieredRun(in_turn(A, B, A_AGAIN, every_ns=every_ns), tier(write=0.5, read=10.0), **SMALL)
    written_ns = STEP_NS + 1600 * TOKEN_NS + 2 * A_BYTES  # B waits for A's blocks to be written, and then runs
    assert run.rows[1]["scheduled_ns"] == written_ns
    b_written_ns = written_ns + STEP_NS + 1760 * TOKEN_NS + 2 * 1760 * TOKEN_BYTES
    assert run.rows[2]["first_token_ns"] == b_written_ns + A_BYTES // 10 + REST_NS


def test_a_link_is_first_in_first_out_and_idles_only_for_lack_of_work():
    link = FifoLink(2e9, 500)
    assert [link.send(4000, ready) for ready in (1000, 1000, 9000)] == [3500, 5500, 11_500]


# Swap against recompute


def preempting(read, preemption):
    """Return two requests that outgrow the memory together: the second is preempted once."""
    requests = [WorkloadRequest(id, id, (("", 1600),), 400) for id in (0, 1)]
    return TieredRun(requests, tier(read=read), preemption=preemption, num_blocks=231)


def test_swapping_pays_where_a_link_moves_a_token_faster_than_a_step_computes_it():
    break_even = TOKEN_BYTES / TOKEN_NS  # GB/s are bytes a nanosecond
    recomputed = preempting(1.0, "recompute").rows[1]
    assert recomputed["preemptions"] == 1 and recomputed["swapped_in_tokens"] == 0
    for factor, pays in ((0.25, False), (0.5, False), (2, True), (4, True)):
        swapped = preempting(factor * break_even, "swap").rows[1]
        assert swapped["preemptions"] == 1 and swapped["swapped_in_tokens"] > 100
        assert swapped["recomputed_tokens"] < BLOCK
        assert (swapped["finish_ns"] < recomputed["finish_ns"]) == pays, factor


def test_what_is_swapped_in_is_not_a_prefix_hit():
    run = preempting(10.0, "swap")
    assert run.rows[1]["tier_hit_tokens"] == []
    scalars = RunMetrics(run.table).scalars()
    assert scalars["tier_hit_rate"] == 0 and scalars["swapped_in_tokens"] == run.rows[1]["swapped_in_tokens"]


# What tiers hold


class Stack:
    """An oracle for tiers: one LRU list of keys."""

    def __init__(self):
        self.keys = OrderedDict()

    def use(self, key):
        self.keys.pop(key, None)
        self.keys[key] = None

    def newest(self, first, last):
        return set(list(reversed(self.keys))[first:last])


keys = st.lists(st.integers(0, 12).map(lambda n: bytes([n])), max_size=80)


@given(used=keys, capacities=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_tiers_are_one_lru_list_cut_at_their_capacities(used, capacities):
    cache, stack, place = TieredCache(capacities), Stack(), {}
    for key in used:
        pushed = cache.use(key)
        stack.use(key)
        place[key] = 0
        place.update(pushed)
        cache.check()
        first = 0
        for number, capacity in enumerate(capacities):
            held = {key for key in set(used) if cache.tier(key) == number}
            assert held == stack.newest(first, first + capacity)
            first += capacity
        assert {key: number for key, number in place.items() if number < len(capacities)} == {
            key: cache.tier(key) for key in place if cache.tier(key) is not None
        }


conversations = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=14
)


def turns(drawn, every_ns):
    return in_turn(*(((name, blocks * 20), ("", extra)) for name, blocks, extra in drawn), output=3, every_ns=every_ns)


@examples(0.3)
@given(drawn=conversations)
def test_an_endless_tier_finds_what_an_endless_gpu_would(drawn):
    requests = turns(drawn, every_ns=1 * S)
    tiered = TieredRun(requests, tier(read=INSTANT), num_blocks=60)
    assert tiered.hits == TieredRun(requests, num_blocks=10_000).hits


@examples(0.3)
@given(drawn=conversations, small=st.integers(1, 60), more=st.integers(0, 60))
def test_more_capacity_never_finds_less(drawn, small, more):
    requests = turns(drawn, every_ns=1 * S)
    found = [
        TieredRun(requests, tier(blocks=blocks, read=INSTANT), num_blocks=60).hits for blocks in (small, small + more)
    ]
    assert all(few <= many for few, many in zip(*found, strict=True))


# Whatever happens


@examples(0.3)
@given(
    drawn=conversations,
    outputs=st.lists(st.integers(1, 60), min_size=14, max_size=14),
    every_ns=st.sampled_from([0, 7 * MS, 40 * MS]),
    policy=st.sampled_from(sorted(POLICIES)),
    tiers=st.lists(st.tuples(st.integers(1, 120), st.sampled_from([0.01, 1.0, INSTANT])), min_size=1, max_size=2),
    preemption=st.sampled_from(["swap", "recompute"]),
    overlapped=st.booleans(),
    order=st.sampled_from(["fcfs", "priority"]),
    budget=st.sampled_from([24, 900]),
    reserve=st.booleans(),
)
def test_every_request_gets_its_tokens(
    drawn, outputs, every_ns, policy, tiers, preemption, overlapped, order, budget, reserve
):
    requests = [
        WorkloadRequest(r.id, r.arrival_ns, r.prompt, outputs[r.id], priority=outputs[-r.id] % 3, tenant=str(r.id % 2))
        for r in turns(drawn, every_ns)
    ]
    sizes = {
        "num_blocks": 62,
        "max_num_seqs": 6,
        "max_num_batched_tokens": budget,
        "max_model_len": 900,
        "async_scheduling": overlapped,
        "scheduler_reserve_full_isl": reserve,
    }
    asked = [tier(str(n), blocks, speed, speed, latency_us=50) for n, (blocks, speed) in enumerate(tiers)]
    run, again = (
        TieredRun(requests, *asked, policy=policy, preemption=preemption, order=order, **sizes) for _ in range(2)
    )
    assert [row["status"] for row in run.rows] == ["finished"] * len(requests)
    assert [row["output_tokens"] for row in run.rows] == [request.output_len for request in requests]
    assert all(hit < row["prompt_tokens"] for hit, row in zip(run.hits, run.rows, strict=True))
    assert run.rows == again.rows


@pytest.mark.skipif(not MOONCAKE.exists(), reason="shared/data/mooncake is not here")
def test_hits_on_the_mooncake_trace_rise_with_capacity(tmp_path):
    with MOONCAKE.open() as lines:
        (tmp_path / "slice.jsonl").write_text("".join(islice(lines, 500)))
    requests = [replace(request, output_len=1) for request in read_workload(str(tmp_path / "slice.jsonl")).requests]
    sizes = SchedulerConfig(num_blocks=400, block_size=512, max_model_len=150_000)
    rates = []
    for blocks in (400, 1600, 6400, 25_600):
        tiers = KvTiersConfig(tiers=(tier(blocks=blocks, block=512, read=50),), kv_bytes_per_token=TOKEN_BYTES)
        sink = TableSink()
        Cluster(Deployment(scheduler=sizes, kv_tiers=tiers), TokenCost(MS, 20_000, 0), sink).run(Workload(requests))
        rates.append(RunMetrics(sink.requests).scalars()["tier_hit_rate"])
    assert rates == sorted(rates) and rates[0] < rates[-1] > 0.1


# What is refused


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tiers": []}, "tiers"),
        ({"tiers": [{"name": "a", "capacity_gib": 1, "read_gb_s": 1, "write_gb_s": 1}] * 2}, "kv_tiers"),
        ({"tiers": [{"name": "a", "capacity_gib": 1, "read_gb_s": 0, "write_gb_s": 1}]}, "read_gb_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, field):
    with pytest.raises(UserError, match=field):
        parse(Deployment, {"kv_tiers": settings}, where="deployment")


def test_blocks_are_found_by_their_prefix_or_not_at_all():
    tiers = {"tiers": [tier().model_dump()]}
    with pytest.raises(UserError, match="enable_prefix_caching"):
        parse(Deployment, {"kv_tiers": tiers, "scheduler": {"enable_prefix_caching": False}}, where="deployment")


def test_a_tier_that_holds_no_block_is_refused():
    small = KvTier(name="cpu", capacity_gib=1e-6, read_gb_s=1, write_gb_s=1)
    with pytest.raises(UserError, match="is smaller than one KV block of 1600000 bytes"):
        TieredRun(in_turn(A), small)


def test_a_model_without_shapes_needs_its_bytes_said():
    deployment = Deployment(model="random:nothing", kv_tiers=KvTiersConfig(tiers=(tier(),)))
    with pytest.raises(UserError, match=r"set kv_tiers\.kv_bytes_per_token"):
        Cluster(deployment, COST, TableSink())


def test_a_crash_takes_the_tiers_along():
    """What a replica had in its tiers is gone; requests that were loading start again elsewhere, and none is lost."""
    fleet = {"failures": {"crashes": [{"at_s": 2.005, "recovery_s": 0.5}]}}
    tiers = KvTiersConfig(tiers=(tier(),), kv_bytes_per_token=TOKEN_BYTES)
    deployment = Deployment(
        scheduler=SchedulerConfig(**SMALL), kv_tiers=tiers, fleet=parse(FleetConfig, fleet, "fleet")
    )
    sink = TableSink()
    Cluster(deployment, COST, sink).run(Workload(in_turn(A, B, A_AGAIN)))
    last = sink.requests.sort_by("request_id").to_pylist()[2]
    assert (last["status"], last["attempts"], last["tier_hit_tokens"]) == ("finished", 2, [])
    assert last["first_token_ns"] == 2505 * MS + STEP_NS + 1760 * TOKEN_NS
