"""Contiguous reservations: runs that never overlap and are never lost, on both clocks, and what they waste."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.serving.test_policies import decisions, tight, traffic
from tests.serving.test_scheduler_properties import LOOPS, leapt
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.contiguous_pool import ContiguousPool
from tokentwin.serving.request import Request, Status
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.step_metrics import StepMetrics
from tokentwin.traces.tables import MemoryTables

ALONE: dict[str, Any] = {"enable_prefix_caching": False}


def reserving(kind: str, **settings: Any) -> SchedulerConfig:
    return SchedulerConfig(kv_reservation=kind, **{**ALONE, **settings})


def request(id: int, prompt: int, output: int) -> Request:
    return Request(WorkloadRequest(id, 0, (("", prompt),), output))


def test_a_run_is_as_long_as_the_baseline_says() -> None:
    asked = request(0, 100, 50)
    sizes = [
        (reserving("max_model_len", max_model_len=1000), 63),
        (reserving("max_tokens"), 10),
        (reserving("max_tokens", kv_reserved_max_tokens=400), 32),
        (reserving("max_tokens", kv_reserved_max_tokens=4000, max_model_len=1000), 63),
    ]
    for config, blocks in sizes:
        assert ContiguousPool(config, names=False).reserved(asked) == blocks


@examples(0.5)
@given(st.integers(0, 2**32))
def test_runs_do_not_overlap_and_come_back_whole(seed: int) -> None:
    """Against a map of every block; first fit takes the lowest run that is long enough."""
    chance = random.Random(seed)
    pool = ContiguousPool(reserving("max_tokens", num_blocks=65, block_size=4), names=True)
    taken: dict[int, Request] = {}
    for id in range(60):
        one = request(id, chance.randrange(1, 60), chance.randrange(1, 40))
        owned = {block for other in taken.values() for block in other.blocks}
        assert pool.free == 64 - len(owned)
        need = pool.reserved(one)
        fits = [b for b in range(1, 66 - need) if owned.isdisjoint(range(b, b + need))]
        assert (pool.longest >= need) == bool(fits)
        if fits:
            pool.admit(one, pool.lookup(one))
            assert one.blocks == list(range(fits[0], fits[0] + need))
            taken[id] = one
        if taken and chance.random() < 0.6:
            pool.release(taken.pop(chance.choice(list(taken))))
    for one in taken.values():
        pool.release(one)
    assert pool.free == pool.total == pool.longest


@examples(0.3)
@given(st.integers(0, 2**32), LOOPS, st.sampled_from(["max_model_len", "max_tokens"]), st.sampled_from(["vllm", "sjf"]))
def test_everybody_finishes_and_nobody_is_preempted(seed: int, loop: tuple[int, bool], kind: str, policy: str) -> None:
    chance = random.Random(seed)
    depth, overlapped = loop
    config = tight(chance, async_scheduling=overlapped, kv_reservation=kind, **ALONE)
    requests = traffic(chance, 15)
    log = decisions(policy, config, requests, depth)
    assert not any(preempted for _, _, preempted in log)  # type: ignore[misc]
    served = {id for _, rows, _ in log for id, _ in rows}  # type: ignore[misc]
    assert served == {r.id for r in requests if r.prompt_len + r.output_len <= config.max_model_len}
    if not overlapped and depth == 1:
        assert leapt(policy, config, requests, leaps=True) == leapt(policy, config, requests, leaps=False)


def test_with_room_for_all_a_reservation_decides_as_paging_does() -> None:
    chance = random.Random(1)
    requests = traffic(chance, 20)
    roomy = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "max_model_len": 128, "num_blocks": 400}
    paged = decisions("vllm", SchedulerConfig(**roomy, **ALONE), requests)
    for kind in ("max_model_len", "max_tokens"):
        assert decisions("vllm", reserving(kind, **roomy), requests) == paged


def test_fewer_run_at_once_than_with_pages() -> None:
    """640 tokens of KV hold 5 requests of 128 tokens at most, or 20 of the 32 that each needs."""
    requests = [WorkloadRequest(id, 0, (("", 16),), 16) for id in range(40)]
    most = {}
    for kind in ("paged", "max_tokens", "max_model_len"):
        config = reserving(kind, num_blocks=41, max_model_len=128, max_num_seqs=64)
        sink = TableSink()
        Cluster(Deployment(scheduler=config), TokenCost(1000, 0, 0), sink, shares_prefixes=False).run(
            Workload(requests)
        )
        most[kind] = max(sink.steps["running"].to_pylist())
        assert set(sink.requests["status"].to_pylist()) == {Status.FINISHED.value}
    assert most["max_model_len"] == 5 and most["max_tokens"] == 20 <= most["paged"]


def test_what_is_wasted_is_what_counting_it_gives() -> None:
    """Two requests in a row, a step each nanosecond; 8 of the 40 blocks are taken at a time, at the low end."""
    requests = [WorkloadRequest(id, 1000 * id, (("", 16),), 17) for id in range(2)]
    found = {}
    for kind in ("paged", "max_tokens", "max_model_len"):
        config = reserving(kind, num_blocks=41, max_model_len=128)
        sink = TableSink()
        Cluster(Deployment(scheduler=config), TokenCost(1, 0, 0), sink, shares_prefixes=False).run(Workload(requests))
        run = {"deployment": Deployment(scheduler=config).model_dump_json(), "num_blocks": 40}
        found[kind] = RunMetrics(sink.requests, sink.steps, run).scalars()
    used = (8 + 24 * 16) / 17  # 8 on average in the first step, then 16 to 32
    assert found["max_model_len"]["kv_internal_fragmentation"] == pytest.approx(1 - used / 128)
    assert found["max_tokens"]["kv_internal_fragmentation"] == pytest.approx(1 - used / 48)
    assert found["paged"]["kv_internal_fragmentation"] == pytest.approx(1 - used / (used + 7.5))
    assert found["paged"]["kv_external_fragmentation"] is None
    assert found["max_tokens"]["kv_external_fragmentation"] == 0.0  # what is free is one run
    scattered = sink.steps.set_column(
        sink.steps.schema.get_field_index("longest_free_blocks"), "longest_free_blocks", pa.array([8] * len(sink.steps))
    )
    assert StepMetrics(MemoryTables(steps=scattered), 40).external_fragmentation() == pytest.approx(1 - 8 / 32)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kv_reservation": "max_tokens"}, "needs enable_prefix_caching false"),
        ({"kv_reserved_max_tokens": 5}, "needs kv_reservation max_tokens"),
    ],
)
def test_what_cannot_be_reserved_is_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(SchedulerConfig, wrong, "scheduler")


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["max_model_len", "max_tokens"])
def test_the_engine_says_the_same_from_contiguous_memory(kind: str) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files

    files = load_model_files("random:llama", Path())
    said = []
    for each in ("paged", kind):
        config = reserving(each, num_blocks=60, block_size=4, max_model_len=64, max_num_seqs=4)
        engine = Engine(Deployment(model="random:llama", dtype="float32", scheduler=config), files)
        for id in range(6):
            prompt = [(7 * id + n) % 1000 for n in range(5 + 4 * id)]
            engine.add(WorkloadRequest(id, 0, (("", len(prompt)),), 8), prompt)
        sequences = dict(engine.sequences)
        while engine.step():
            pass
        engine.close()
        said.append([sequences[id].outputs for id in range(6)])
    assert said[0] == said[1] and all(len(output) == 8 for output in said[0])
