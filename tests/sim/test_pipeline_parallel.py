"""Pipeline parallelism: stages in closed form, requests as without, and what each stage holds, prices and sends."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, MIXTURE, SCHEDULER, Roofline, deployment
from tests.sim.fleet_samples import FleetRun, assert_everything_is_accounted_for, poisson
from tests.sim.test_fleet_properties import fleets
from tokentwin.calibration.operations import floor_ns, uniform_step
from tokentwin.calibration.step_operations import stage_transfer
from tokentwin.calibration.steps.correction import ADDED, Correction
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.interval import StepInterval
from tokentwin.calibration.steps.launches import UNKNOWN
from tokentwin.calibration.steps.observed import ObservedPipeline
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.planning.diagnose.lifted_costs import (
    StagesAtOnce,
    repriced,
    with_free_prefill,
    with_half_the_kv,
    with_parts,
    without_cpu_time,
)
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.vllm_command import vllm_command
from tokentwin.serving.cost_model import PipelinedCost, TokenCost, paced
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import plain_fleet
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity, stage_weight_bytes
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import layers_of_stages, stage_models
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster, Simulated
from tokentwin.sim.fleet import alike_pools
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics

SHORT = examples(0.3)
CHUNK = 64


class StageTimes(TokenCost):
    """`PipelinedCost` in which each stage takes a fixed time, whatever a step's tokens."""

    def __init__(self, stages: list[int], transfer: int = 0, cpu: int = 0) -> None:
        super().__init__(sum(stages) + transfer * (len(stages) - 1), 0, 0, cpu)
        self.stages, self.transfer = stages, transfer

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return self.stages

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [self.transfer] * (len(self.stages) - 1)


def run(
    cost: TokenCost | PipelinedCost,
    requests: list[WorkloadRequest],
    stages: int,
    policy: str = "vllm",
    order: str = "fcfs",
    tokens: bool = False,
    **scheduler: Any,
) -> tuple[Simulated, TableSink]:
    settings = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 1000, "policy": order, **scheduler}
    config = parse(SchedulerConfig, settings, "scheduler")
    sink = TableSink()
    engine = Deployment(policy=policy, pipeline_parallel_size=stages, scheduler=config)
    cluster = Cluster(engine, cost, sink, shares_prefixes=False, tokens=tokens)
    return cluster.run(Workload(requests)), sink


def prompts(count: int) -> list[WorkloadRequest]:
    """Return requests that each fill a step, and end with it."""
    return [WorkloadRequest(id, 0, (("", CHUNK),), 1) for id in range(count)]


# Stages in closed form


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_steps_of_equal_stages_take_one_stage_each_and_the_pipeline_once(steps: int, stages: int) -> None:
    done, sink = run(StageTimes([1000] * stages), prompts(steps), stages)
    assert done.duration_ns == (steps + stages - 1) * 1000
    found = RunMetrics(sink.requests, sink.steps, {"replicas": 1, "num_blocks": 1}).scalars()
    assert found["busy"] == pytest.approx(1.0)
    if stages == 1:
        assert found["pipeline_bubble"] is None
    else:
        assert found["pipeline_bubble"] == pytest.approx((stages - 1) / (steps + stages - 1))


def test_throughput_tends_to_as_many_engines_as_there_are_stages() -> None:
    single = run(TokenCost(8000, 0, 0), prompts(400), 1)[0].duration_ns
    ratios = [
        single / 400 * steps / run(StageTimes([2000] * 4), prompts(steps), 4)[0].duration_ns
        for steps in (1, 4, 40, 400)
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1.0
    assert 3.9 < ratios[-1] < 4.0


@SHORT
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), st.integers(0, 500), st.integers(1, 12))
def test_the_slowest_stage_sets_the_pace(stages: list[int], transfer: int, steps: int) -> None:
    done, sink = run(StageTimes(stages, transfer), prompts(steps), len(stages))
    ends = sink.steps["end_ns"].to_pylist()
    assert ends == flow_shop(stages, transfer, steps)
    assert done.duration_ns >= sum(stages) + transfer * (len(stages) - 1) + (steps - 1) * max(stages)


def flow_shop(stages: list[int], transfer: int, steps: int) -> list[int]:
    """Return the ends of steps of a flow shop: a step enters when the one `stages` steps before has left."""
    done = np.zeros((steps, len(stages)), dtype=int)
    for step in range(steps):
        arrives = done[step - len(stages), -1] if step >= len(stages) else 0
        for stage, ns in enumerate(stages):
            done[step, stage] = max(arrives, done[step - 1, stage] if step else 0) + ns
            arrives = done[step, stage] + transfer
    ends: list[int] = done[:, -1].tolist()
    return ends


def test_cpu_time_is_paid_once_a_way_through_the_pipeline() -> None:
    done, _ = run(StageTimes([1000] * 4, cpu=300), prompts(20), 4)
    assert done.duration_ns == 20 // 4 * 300 + 23 * 1000


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_lone_request_gains_nothing_and_waits_for_every_token(overlaps: bool) -> None:
    alone = [WorkloadRequest(0, 0, (("", CHUNK),), 11)]
    done, sink = run(StageTimes([1000] * 4, 50), alone, 4, async_scheduling=overlaps)
    assert done.duration_ns == 11 * 4150
    assert sink.steps["in_flight"].to_pylist() == [0, *[int(overlaps)] * 10]


def test_the_overlapped_loop_hides_cpu_time_from_all_tokens_but_the_first() -> None:
    alone = [WorkloadRequest(0, 0, (("", CHUNK),), 11)]
    times = [
        run(StageTimes([1000] * 4, cpu=300), alone, 4, async_scheduling=overlaps)[0].duration_ns
        for overlaps in (False, True)
    ]
    assert times == [11 * 4300, 300 + 11 * 4000]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_decodes_that_begin_one_stage_time_apart_fill_every_stage(stages: int) -> None:
    """A request decodes in every `stages`-th plan, and every plan is one request's."""
    requests = [WorkloadRequest(id, 0, (("", CHUNK),), 20) for id in range(stages)]
    done, sink = run(StageTimes([1000] * stages), requests, stages, async_scheduling=True)
    assert done.duration_ns == (20 * stages + stages - 1) * 1000
    rows = sink.steps["decode_rows"].to_pylist()
    assert rows == [0] * stages + [1] * 19 * stages


def test_decodes_that_were_sampled_together_stay_together() -> None:
    """They leave the other stages idle: vLLM decodes a request in every `stages`-th plan."""
    requests = [WorkloadRequest(id, 0, (("", CHUNK // 4),), 20) for id in range(4)]
    done, sink = run(StageTimes([1000] * 3), requests, 3, async_scheduling=True)
    assert done.duration_ns == 20 * 3000
    assert sink.steps["decode_rows"].to_pylist() == [0] + [4] * 19


def test_chunks_of_one_prompt_follow_each_other_into_the_pipeline() -> None:
    long = [WorkloadRequest(0, 0, (("", 8 * CHUNK),), 1)]
    assert run(StageTimes([1000] * 4), long, 4)[0].duration_ns == (8 + 3) * 1000
    assert run(TokenCost(4000, 0, 0), long, 1)[0].duration_ns == 8 * 4000


def test_a_slower_engine_is_slower_on_every_stage() -> None:
    cost = StageTimes([1000, 2000], 100)
    slow = paced(cost, 1.5)
    plan = StepPlan(0, DecodeSet(16), 0)
    assert isinstance(slow, PipelinedCost)
    assert (slow.stages_ns(plan), slow.transfers_ns(plan)) == ([1500, 3000], [150])
    assert not isinstance(paced(TokenCost(1000, 0, 0), 1.5), PipelinedCost)
    sink = TableSink()
    engine = Deployment(pipeline_parallel_size=2, scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK))
    fleet = plain_fleet(1)
    slowed = fleet.model_copy(update={"pools": (fleet.pools[0].model_copy(update={"speed": 0.5}),)})
    pools = alike_pools(slowed, engine, cost)
    assert pools[0].gpus == 2
    assert Cluster(engine, cost, sink, fleet=slowed, pools=pools).run(Workload(prompts(1))).duration_ns == 6200


# Requests as without


@st.composite
def offered(draw: st.DrawFn) -> list[WorkloadRequest]:
    rows = draw(st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 90), st.integers(1, 20)), max_size=25))
    return [
        WorkloadRequest(id, arrival, (("", prompt),), output, priority=id % 3)
        for id, (arrival, prompt, output) in enumerate(sorted(rows))
    ]


@SHORT
@given(
    offered(),
    st.sampled_from(sorted(POLICIES)),
    st.integers(2, 8),
    st.sampled_from([8, 14, 300]),
    st.booleans(),
    st.booleans(),
)
def test_a_pipeline_serves_the_same_requests_token_by_token(requests, policy, stages, num_blocks, ordered, overlaps):
    limits = {"num_blocks": num_blocks, "max_model_len": 110, "max_num_seqs": 9, "async_scheduling": overlaps}
    cost = StageTimes([500 + 37 * stage for stage in range(stages)], 11, 23)
    order = "priority" if ordered else "fcfs"
    runs = [run(cost, requests, size, policy, order, tokens=True, **limits) for size in (1, stages)]
    (alone, plain), (done, piped) = runs
    assert (done.finished, done.output_tokens) == (alone.finished, alone.output_tokens)
    columns = ["request_id", "status", "output_tokens"]
    outcomes = [sink.requests.select(columns).sort_by("request_id") for sink in (plain, piped)]
    assert outcomes[0] == outcomes[1]
    for row in piped.requests.filter(piped.requests["status"].to_numpy(zero_copy_only=False) == "finished").to_pylist():
        times = row["token_times_ns"]
        assert len(times) == row["output_tokens"]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert not gaps or min(gaps) >= cost.base_ns, "a token was computed before the one in front of it was there"


def test_a_request_has_at_most_one_decode_in_the_pipeline() -> None:
    rng = np.random.default_rng(5)
    requests = [
        WorkloadRequest(id, int(rng.integers(20_000)), (("", int(rng.integers(1, 150))),), int(rng.integers(1, 30)))
        for id in range(60)
    ]
    requests.sort(key=lambda request: request.arrival_ns)
    requests = [WorkloadRequest(id, r.arrival_ns, r.prompt, r.output_len) for id, r in enumerate(requests)]
    _, sink = run(StageTimes([400, 500, 450]), requests, 3, tokens=True, num_blocks=200)
    steps = sink.steps.to_pylist()
    assert max(step["in_flight"] for step in steps) == 2
    computed: Counter[int] = Counter()
    under_way: list[tuple[int, set[int]]] = []
    for step in steps:
        under_way = [(end, ids) for end, ids in under_way if end > step["plan_ns"]]
        sampled_in_flight = set().union(*(ids for _, ids in under_way))
        assert not sampled_in_flight & set(step["row_ids"])
        computed.update(dict(zip(step["row_ids"], step["row_tokens"], strict=True)))
        ready = {id for id in step["row_ids"] if computed[id] >= requests[id].prompt_len}
        under_way.append((step["end_ns"], ready))


class EvenStages(TokenCost):
    """`PipelinedCost` of the fleet tests' cost, spread over three stages."""

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return [self.step_ns(plan) // 3] * 3

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [100_000] * 2


@given(fleet=fleets(), seed=st.integers(0, 1000))
@examples(0.1)
def test_a_fleet_of_pipelines_loses_nobody(fleet: dict[str, Any], seed: int) -> None:
    """Whatever crashes, slows down, gives up waiting or is added."""
    staged = {"pipeline_parallel_size": 3}
    pools = [{**pool, "deployment": {**pool.get("deployment", {}), **staged}} for pool in fleet["pools"]]
    offered = poisson(60, 30.0, seed)
    cost = EvenStages(6_000_000, 18_000, 450)
    ran = FleetRun({**fleet, "pools": pools}, offered, cost, num_blocks=200, max_num_batched_tokens=128)
    assert_everything_is_accounted_for(ran, offered)
    assert {life["gpus"] for life in ran.lives} == {3}


# How layers are shared out


@pytest.mark.parametrize(
    ("layers", "stages", "shares"),
    [
        (32, 4, [8, 8, 8, 8]),
        (33, 4, [8, 8, 9, 8]),
        (35, 4, [9, 9, 9, 8]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (5, 1, [5]),
    ],
)
def test_layers_are_shared_out_as_vllm_does(layers: int, stages: int, shares: list[int]) -> None:
    assert layers_of_stages(layers, stages) == shares


@given(st.integers(1, 130), st.integers(1, 64))
def test_no_layer_is_lost_and_none_is_twice(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(UserError, match=f"must be at most {layers}, the number of the model's layers"):
            layers_of_stages(layers, stages)
        return
    shares = layers_of_stages(layers, stages)
    assert sum(shares) == layers
    assert max(shares) - min(shares) <= 1
    assert shares[-1] == min(shares)
    model = MIXTURE.model_copy(update={"num_layers": layers, "dense_at": (), "sliding_layers": layers // 2})
    parts = stage_models(model, stages)
    assert sum(part.sliding_layers for part in parts) == layers // 2
    assert all(0 <= part.sliding_layers <= part.num_layers for part in parts)


def test_dense_layers_stay_where_they_are() -> None:
    changes = {"num_layers": 8, "dense_at": (0, 1, 2, 7), "sliding_layers": 0, "sliding_window": 0}
    parts = stage_models(MIXTURE.model_copy(update=changes), 4)
    assert [(part.num_layers, part.dense_at) for part in parts] == [(2, (0, 1)), (2, (0,)), (2, ()), (2, (1,))]


# What a stage holds


def test_weights_of_stages_by_hand() -> None:
    layer = 4096 * (6144 + 4096) + 3 * 4096 * 14336 + 2 * 4096  # attention, MLP, norms
    matrix, rotary = 128256 * 4096, 131072 * 128
    stages = stage_weight_bytes(LLAMA, deployment(pipeline_parallel_size=3))
    assert layers_of_stages(32, 3) == [11, 11, 10]
    assert stages == [
        2 * (11 * layer + matrix + rotary),
        2 * (11 * layer + rotary),
        2 * (10 * layer + matrix + 4096 + rotary),
    ]
    (whole,) = stage_weight_bytes(LLAMA, deployment())
    assert sum(stages) == whole + 2 * 2 * rotary
    tied = LLAMA.model_copy(update={"tied_embeddings": True})
    assert stage_weight_bytes(tied, deployment(pipeline_parallel_size=3)) == stages
    assert stage_weight_bytes(tied, deployment())[0] == whole - 2 * matrix


def test_blocks_are_those_of_the_fullest_stage() -> None:
    gpu = find_gpu("H100")
    two = kv_capacity(LLAMA, gpu, deployment(pipeline_parallel_size=2))
    one = kv_capacity(LLAMA, gpu, deployment())
    assert two.block * 2 == one.block == 2 * 32 * 8 * 128 * 16 * 2
    first, last = stage_weight_bytes(LLAMA, deployment(pipeline_parallel_size=2))
    assert first + 8192 == last == two.weights
    assert two.sampler > 0  # it is the last one that binds, where the sampler is
    assert two.num_blocks > 2 * one.num_blocks
    big = LLAMA.model_copy(update={"num_layers": 3})  # layers as 2 and 1: the first has more weights and larger blocks
    first_binds = kv_capacity(big, gpu, deployment(pipeline_parallel_size=2))
    assert layers_of_stages(3, 2) == [2, 1]
    assert (first_binds.block, first_binds.sampler) == (2 * one.block // 32, 0)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Qwen3-30B-A3B", "Llama-3.1-70B", "Gemma-2-9B"])
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_more_stages_leave_more_room(name: str, stages: int) -> None:
    model, gpu = find_model(name), find_gpu("H200")
    fewer, more = (
        kv_capacity(model, gpu, Deployment(model=name, pipeline_parallel_size=size)) for size in (stages // 2, stages)
    )
    assert more.num_blocks > fewer.num_blocks
    assert more.weights < fewer.weights


# What a stage costs


def correction() -> Correction:
    return Correction(added_ns={name: 1000.0 * (number + 1) for number, name in enumerate(ADDED)})


def a_plan(rows: int, context: int, prompt: int) -> StepPlan:
    plan = StepPlan(0, DecodeSet(16), 0)
    if rows:
        plan.add_decodes(rows, rows * context, rows * context * context)
    if prompt:
        plan.prefill_rows, plan.prefill_tokens, plan.prefill_pairs = 1, prompt, prompt * (prompt + 1) // 2
        plan.sampled_rows += 1
    return plan


@pytest.mark.parametrize("model", [LLAMA, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(("stages", "tp"), [(2, 1), (3, 2), (32, 1)])
@pytest.mark.parametrize(("rows", "context", "prompt"), [(64, 1024, 0), (7, 300, 500), (0, 0, 2048), (1, 1, 0)])
def test_stages_and_transfers_sum_to_the_step(model, stages, tp, rows, context, prompt):
    engine = deployment(pipeline_parallel_size=stages, tensor_parallel_size=tp, enforce_eager=True)
    host = HostTimes(launches=UNKNOWN)  # each stage waits for a host of its own
    cost = PipelineCost(model, engine, Roofline(), correction(), host)
    plan = a_plan(rows, context, prompt)
    whole = sum(cost.stages_ns(plan)) + sum(cost.transfers_ns(plan))
    assert whole == pytest.approx(cost.step_ns(plan), abs=3 * stages, rel=1e-3 if prompt else 1e-6)
    alone = deployment(tensor_parallel_size=tp, enforce_eager=True)
    single = OperationCost(model, alone, Roofline(), correction(), host)
    hops = sum(cost.transfers_ns(plan))
    assert cost.step_ns(plan) == pytest.approx(single.step_ns(plan) + hops, abs=3 * stages)


def test_only_the_last_stage_samples_and_alike_stages_cost_alike() -> None:
    cost = PipelineCost(LLAMA, deployment(pipeline_parallel_size=4), Roofline(), correction())
    with_token, without = a_plan(8, 100, 0), a_plan(8, 100, 0)
    without.sampled_rows = 0
    first, second, third, last = cost.stages_ns(with_token)
    assert first == second == third < last
    assert cost.stages_ns(without)[:3] == [first] * 3
    assert cost.stages_ns(without)[3] < last


def test_what_goes_between_stages() -> None:
    tokens, hidden = 300, LLAMA.hidden_size
    (send,) = stage_transfer(LLAMA, deployment(pipeline_parallel_size=5), tokens, False)
    assert (send.kind, send.count, send.bytes) == ("p2p", 1, 2 * 2 * tokens * hidden)  # hidden states and residuals
    engine = deployment(pipeline_parallel_size=5, tensor_parallel_size=4)
    send, gather = stage_transfer(LLAMA, engine, tokens, False)
    assert send.bytes == tokens * hidden  # a quarter each
    assert (gather.name, gather.count, gather.bytes) == ("gather on stage", 1, 0.75 * 4 * tokens * hidden)
    cost = PipelineCost(LLAMA, deployment(pipeline_parallel_size=2), Roofline())
    prompt = a_plan(0, 0, 300)
    hop = floor_ns(Roofline.gpu, stage_transfer(LLAMA, deployment(pipeline_parallel_size=2), tokens, False)[0])
    assert cost.transfers_ns(prompt) == [round(hop / 0.8 + 2000)]


def test_explain_shows_the_stages() -> None:
    cost = PipelineCost(LLAMA, deployment(pipeline_parallel_size=3), Roofline(), correction(), HostTimes(1e6, 0))
    found = explain(cost, uniform_step(64, 1000, 1, 256, 0))
    assert [stage.layers for stage in found.stages] == [11, 11, 10]
    (send,) = [operation for operation in found.operations if operation.name == "send to stage"]
    assert sum(stage.ns for stage in found.stages) + send.ns == pytest.approx(found.step_ns)
    assert explain(OperationCost(LLAMA, deployment(), Roofline()), uniform_step(1, 1, 0, 2, 0)).stages == []


def test_lifted_and_scaled_costs_keep_their_stages() -> None:
    interval = StepInterval((0.9, 1.1), (0.8, 1.2))
    cost = PipelineCost(LLAMA, deployment(pipeline_parallel_size=2), Roofline(), correction(), interval=interval)
    mixed, decodes = a_plan(8, 100, 200), a_plan(8, 100, 0)
    slow = ObservedPipeline(cost).ends()[1]
    assert slow.stages_ns(mixed)[0] > cost.stages_ns(mixed)[0]
    free = with_free_prefill(cost)
    assert isinstance(free, PipelinedCost)
    assert free.stages_ns(mixed) == cost.stages_ns(decodes)
    assert free.stages_ns(a_plan(0, 0, 200)) == [0, 0]
    assert free.transfers_ns(a_plan(0, 0, 200)) == [0]
    quick = without_cpu_time(cost)
    assert isinstance(quick, PipelinedCost)
    assert (quick.stages_ns(mixed), quick.transfers_ns(mixed)) == (cost.stages_ns(mixed), cost.transfers_ns(mixed))
    wider = cost.deployment.model_copy(update={"scheduler": SCHEDULER.model_copy(update={"max_num_seqs": 512})})
    for other in (with_half_the_kv(cost), with_parts(cost, 0.0, "collectives"), repriced(cost, wider)):
        assert isinstance(other, PipelineCost)
    silent = with_parts(cost, 0.0, "collectives")
    assert isinstance(silent, PipelineCost) and silent.transfers_ns(mixed) == [0]
    assert StagesAtOnce(cost).step_ns(mixed) == sum(cost.stages_ns(mixed)) // 2


# Who else counts GPUs


def test_stages_are_paid_for_and_passed_on_to_vllm() -> None:
    engine = deployment(pipeline_parallel_size=3, tensor_parallel_size=2)
    priced = Engine("H100", 2.0, engine)
    assert (priced.gpus, priced.usd_per_hour, priced.name) == (6, 12.0, "TP2 PP3 H100")
    assert "--tensor-parallel-size 2 " in vllm_command(engine)
    assert "--pipeline-parallel-size 3 " in vllm_command(engine)
    assert "pipeline" not in vllm_command(deployment())


# What is refused


def test_what_is_not_simulated_is_refused_in_one_line() -> None:
    for overlapped, stages in ((True, 2), (False, 3), (True, 1)):
        scheduler = SchedulerConfig(async_scheduling=overlapped, decode_stagger=3)
        with pytest.raises(UserError, match=r"scheduler\.decode_stagger: 3: follows from pipeline_parallel_size"):
            Deployment(pipeline_parallel_size=stages, scheduler=scheduler)
    with pytest.raises(UserError, match="pipeline_parallel_size: 2: needs the kernel tables of a GPU"):
        run(TokenCost(1000, 0, 0), prompts(1), 2)
    with pytest.raises(
        UserError, match="pipeline_parallel_size: 33: must be at most 32, the number of the model's layers"
    ):
        PipelineCost(LLAMA, deployment(pipeline_parallel_size=33), Roofline())
