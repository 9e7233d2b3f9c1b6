"""LoRA adapters in the simulator: slots, loads, waits, and the time of steps. Decisions: `test_conformance.py`."""

from dataclasses import replace
from random import Random

import pytest

from tokentwin.serving.adapter_times import FREE, AdapterTimes
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.lora import LoraConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.adapter_slots import AdapterSlots
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
TIMES = AdapterTimes(step_ns=3e6, tile_ns=1e6, adapter_ns=2e5, token_ns=5e3, copy_ns=7e6, load_ns=90e6)
ROOMY = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 1024}


class Adapted(TokenCost):
    """A linear cost with the times of adapters."""

    adapters: AdapterTimes | None = TIMES


def simulated(requests, lora=None, cost=None, fleet=None, leaps=True, **scheduler):
    """Return the rows of the requests, in order of id, and the cluster."""
    sink = TableSink()
    deployment = Deployment(scheduler=SchedulerConfig(**ROOMY | scheduler), lora=lora, fleet=fleet)
    cluster = Cluster(deployment, cost or Adapted(6 * MS, 18_000, 450), sink, steps=False, leaps=leaps)
    cluster.run(Workload(requests))
    return sink.requests.sort_by("request_id").to_pylist(), cluster


def traffic(seed, count=60, adapters=5):
    chance = Random(seed)
    at, made = 0, []
    for id in range(count):
        at += chance.choice([0, MS, 40 * MS])
        name = chance.choice(["", *(f"a{k}" for k in range(adapters))])
        prompt = (("shared", 48), ("", chance.randint(1, 200)))
        made.append(WorkloadRequest(id, at, prompt, chance.randint(1, 60), adapter=name))
    return made


def test_slots_and_host_memory_forget_the_least_recently_used():
    """Against a plain list of uses: an adapter is there if it is among the last `size` different ones."""
    chance, slots = Random(3), AdapterSlots(TIMES, LoraConfig(max_loras=2, max_cpu_loras=4))
    used: list[str] = []
    loads = copies = 0
    for _ in range(500):
        one = chance.choice("abcdefg")
        last = list(dict.fromkeys(reversed(used)))
        loads += one not in last[:4]
        copies += one not in last[:2]
        used.append(one)
        plan = StepPlan.from_amounts(decode_rows=1)
        plan.adapters = {one: 1}
        before = slots.use.waiting_ns
        assert slots.ready_ns(plan) == slots.use.waiting_ns - before
    assert slots.use == (loads, copies, loads * 90 * MS + copies * 7 * MS)


def test_one_request_takes_its_load_and_its_longer_steps():
    request = WorkloadRequest(0, 0, (("", 100),), 3, adapter="a")
    (plain,), _ = simulated([replace(request, adapter="")], lora={"max_loras": 1})
    (row,), _ = simulated([request], lora={"max_loras": 1})
    first = 90 * MS + 7 * MS + 3 * MS + 1 * MS + 200_000 + 100 * 5_000  # 100 tokens are two tiles
    assert row["first_token_ns"] - plain["first_token_ns"] == first
    assert row["finish_ns"] - plain["finish_ns"] == first + 2 * (3 * MS + 200_000 + 5_000)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_leaps_are_exact(slots, overlapped):
    given = {"lora": {"max_loras": slots}, "async_scheduling": overlapped}
    assert simulated(traffic(slots), **given)[0] == simulated(traffic(slots), leaps=False, **given)[0]


def test_more_slots_make_nobody_wait_and_fewer_do():
    requests = traffic(1)
    waits = []
    for slots in (1, 2, 5):
        rows, _ = simulated(requests, lora={"max_loras": slots}, cost=Free(6 * MS, 18_000, 450))
        waits.append(sum(row["scheduled_ns"] - row["queued_ns"] for row in rows))
    assert waits[0] > waits[1] > waits[2]
    unlimited, _ = simulated([replace(request, adapter="") for request in requests], enable_prefix_caching=False)
    assert waits[2] <= 1.05 * sum(row["scheduled_ns"] - row["queued_ns"] for row in unlimited)


class Free(TokenCost):
    adapters: AdapterTimes | None = FREE


def test_the_base_model_costs_nothing_more_and_shares_no_prefix_with_adapters():
    base = [replace(request, adapter="") for request in traffic(4)]
    assert simulated(base, lora={"max_loras": 3})[0] == simulated(base)[0]
    prompt = (("shared", 64), ("", 5))
    names = ["", "a", "a", "b"]
    requests = [WorkloadRequest(k, k * 1000 * MS, prompt, 2, adapter=name) for k, name in enumerate(names)]
    rows, _ = simulated(requests, lora={"max_loras": 2})
    assert [row["prefix_hit_tokens"] for row in rows] == [0, 0, 64, 0]


def test_affinity_loads_fewer_adapters():
    loads = {}
    for router in ("round-robin", "adapter-affinity"):
        fleet = {"pools": [{"replicas": 4}], "router": router}
        _, cluster = simulated(traffic(9, 300, 12), lora={"max_loras": 4}, fleet=fleet)
        loads[router] = sum(replica.adapters.use.loads for replica in cluster.replicas)
    assert loads["adapter-affinity"] < loads["round-robin"] / 2


def test_a_slowed_replica_is_slow_with_adapters_too():
    request = WorkloadRequest(0, 0, (("", 100),), 3, adapter="a")
    half = {"pools": [{"replicas": 1, "speed": 0.5}]}
    (row,), _ = simulated([request], lora={"max_loras": 1})
    (slow,), _ = simulated([request], lora={"max_loras": 1}, fleet=half)
    assert slow["finish_ns"] == 2 * row["finish_ns"]


def test_adapters_without_slots_are_rejected_by_name():
    (row,), _ = simulated([WorkloadRequest(0, 0, (("", 9),), 2, adapter="sql")])
    assert row["status"] == "rejected" and "adapter sql" in row["reason"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora": {"max_loras": 4, "max_cpu_loras": 2}}, "max_cpu_loras must be at least max_loras 4"),
        ({"lora": {"max_lora_rank": 12}}, "max_lora_rank must be one of 1, 8, 16"),
        ({"lora": {}, "pipeline_parallel_size": 2}, "cannot be combined with lora"),
        ({"lora": {}, "data_parallel_size": 2}, "cannot be combined with lora"),
        ({"scheduler": {"max_loras": 2}}, "follows from lora.max_loras"),
    ],
)
def test_what_does_not_go_together_is_one_line(given, message):
    with pytest.raises((UserError, ValueError), match=message):
        Deployment(**given)


def test_times_that_are_not_known_are_one_line():
    with pytest.raises(UserError, match=r"^lora: 'on': needs the kernel tables of a GPU"):
        simulated(traffic(1, 2), lora={}, cost=TokenCost(1, 1, 1))
    with pytest.raises(UserError, match=r"^max_loras: 1: cannot be combined with KV from outside"):
        pools = [{"name": role, "role": role} for role in ("prefill", "decode")]
        simulated(traffic(1, 2), lora={}, fleet={"pools": pools, "links": {"kv_bytes_per_token": 1}})
