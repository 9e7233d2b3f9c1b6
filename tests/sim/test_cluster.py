"""A cluster on the virtual clock: routing, the closed loop, CPU time, what is recorded, and what it costs."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from tests.budget import simulated
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster, simulate_to
from tokentwin.sim.router import find_router
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.schema import arrow_schema

MS = 1_000_000
COST = TokenCost(6 * MS, 18_000, 450)


def requests(count, rate_per_s=100.0, seed=0):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate_per_s, count)).astype(int).tolist()
    prompts = np.clip(rng.lognormal(4.5, 1.0, count), 1, 700).astype(int).tolist()
    outputs = np.clip(rng.exponential(50, count), 1, 300).astype(int).tolist()
    return [WorkloadRequest(i, arrivals[i], (("", prompts[i]),), outputs[i]) for i in range(count)]


def cluster(cost=COST, *, replicas=1, router="round-robin", steps=True, tokens=False, **scheduler):
    sink = TableSink()
    config = SchedulerConfig(**{"max_model_len": 1024, "num_blocks": 4096, "max_num_seqs": 64} | scheduler)
    made = Cluster(
        Deployment(scheduler=config),
        cost,
        sink,
        replicas=replicas,
        router=find_router(router),
        shares_prefixes=False,
        steps=steps,
        tokens=tokens,
    )
    return made, sink


def private(requests, concurrency=None):
    return Workload(requests, concurrency=concurrency, shares_prefixes=False)


# Routers


def shares(router, count, replicas=4, **scheduler):
    made, sink = cluster(replicas=replicas, router=router, steps=False, **scheduler)
    made.run(private(requests(count)))
    served = Counter(sink.requests["replica"].to_pylist())
    return [served[index] for index in range(replicas)]


def test_round_robin_takes_exact_turns():
    made, sink = cluster(replicas=4, steps=False)
    made.run(private(requests(1002)))
    by_id = sink.requests.sort_by("request_id")["replica"].to_pylist()
    assert by_id == [id % 4 for id in range(1002)]


@pytest.mark.parametrize("max_num_seqs", [8, 1024], ids=["queues", "everything runs at once"])
def test_least_tokens_counts_running_requests(max_num_seqs):
    """A router that counts only queued requests sends everything to the first replica while nothing queues."""
    for share in shares("least-tokens", 1000, max_num_seqs=max_num_seqs, num_blocks=60_000):
        assert 220 <= share <= 280


def test_least_tokens_is_by_tokens_not_requests():
    long = WorkloadRequest(0, 0, (("", 900),), 100)
    short = [WorkloadRequest(i, i, (("", 40),), 10) for i in range(1, 21)]
    made, sink = cluster(replicas=2, router="least-tokens")
    made.run(private([long, *short]))
    replica = dict(zip(sink.requests["request_id"].to_pylist(), sink.requests["replica"].to_pylist(), strict=True))
    assert replica[0] == 0
    assert {replica[i] for i in range(1, 20)} == {1}  # 19 x 50 = 950 < 1000
    assert replica[20] == 1  # 950 against 1000, still


def test_outstanding_counts_return_to_zero():
    made, _ = cluster(replicas=3, router="least-tokens", steps=False, num_blocks=90)
    made.run(private([*requests(200), WorkloadRequest(200, 10**10, (("", 2000),), 1)]))
    assert [(r.outstanding_tokens, r.outstanding_requests) for r in made.replicas] == [(0, 0)] * 3


class LastOnly:
    """A user's own router, which always chooses the last replica."""

    def choose(self, request, replicas):
        return replicas[-1]


def test_a_router_of_ones_own():
    assert shares(f"{__name__}:LastOnly", 50) == [0, 0, 0, 50]


@pytest.mark.parametrize("name", ["no-such", "", ":", "no.such.module:Router", "tokentwin.sim.router:NoSuch"])
def test_an_unknown_router_is_one_line(name):
    with pytest.raises(UserError) as error:
        find_router(name)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"router: {name!r}")


# The closed loop


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("concurrency", [1, 10])
def test_the_closed_loop_keeps_exactly_its_concurrency(concurrency, replicas):
    offered = [WorkloadRequest(r.id, 0, r.prompt, r.output_len) for r in requests(120)]
    made, sink = cluster(replicas=replicas, router="least-tokens")
    made.run(private(offered, concurrency))
    table = sink.requests.sort_by("request_id")
    arrival, finish = table["arrival_ns"].to_numpy(), table["finish_ns"].to_numpy()
    assert (arrival[:concurrency] == 0).all()
    completions = np.sort(finish)
    assert (arrival[concurrency:] == completions[: 120 - concurrency]).all()
    outstanding = [((arrival <= t) & (finish > t)).sum() for t in arrival]
    assert set(outstanding[concurrency:]) == {concurrency}


def test_the_closed_loop_waits_for_the_earliest_release_and_passes_over_rejections():
    offered = [
        WorkloadRequest(0, 0, (("", 5000),), 1),
        WorkloadRequest(1, 0, (("", 5000),), 1),
        WorkloadRequest(2, 70 * MS, (("", 10),), 1),
        WorkloadRequest(3, 0, (("", 10),), 1),
    ]
    made, sink = cluster()
    made.run(private(offered, concurrency=1))
    arrival = sink.requests.sort_by("request_id")["arrival_ns"].to_pylist()
    assert arrival[:3] == [0, 0, 70 * MS]
    assert arrival[3] == sink.requests.sort_by("request_id")["finish_ns"].to_pylist()[2]


# CPU time


@pytest.mark.parametrize("cpu_ms, step_ms", [(0, 6), (2, 6), (6, 6), (9, 6)])
def test_the_plain_loop_adds_cpu_time_and_the_overlapped_loop_hides_it(cpu_ms, step_ms):
    one = [WorkloadRequest(0, 0, (("", 8),), 50)]
    cost = TokenCost(step_ms * MS, 0, 0, plan_ns=cpu_ms * MS)
    for overlapped, expected_ms in (
        (False, 50 * (cpu_ms + step_ms)),
        (True, cpu_ms + 50 * step_ms if cpu_ms <= step_ms else 50 * cpu_ms + step_ms),
    ):
        for steps in (True, False):
            made, sink = cluster(cost, steps=steps, async_scheduling=overlapped)
            made.run(private(one))
            assert sink.requests["finish_ns"].to_pylist() == [expected_ms * MS]


def test_a_plan_precedes_its_step_by_the_cpu_time():
    made, sink = cluster(TokenCost(6 * MS, 0, 0, plan_ns=2 * MS))
    made.run(private(requests(30)))
    plan, start = sink.steps["plan_ns"].to_numpy(), sink.steps["start_ns"].to_numpy()
    assert (start - plan == 2 * MS).all()


# Requests that cannot be served


def test_rejected_requests_are_recorded_with_their_reason():
    bad = [
        WorkloadRequest(0, 0, (("", 1020),), 10),
        WorkloadRequest(1, 5, (("", 700),), 10),
        WorkloadRequest(2, 6, (("", 0),), 10),
        WorkloadRequest(3, 7, (("", 10),), 10),
    ]
    made, sink = cluster(num_blocks=41, tokens=True)
    done = made.run(private(bad))
    rows = sink.requests.sort_by("request_id").to_pylist()
    assert [row["status"] for row in rows] == ["rejected"] * 3 + ["finished"]
    assert "exceed max_model_len 1024" in rows[0]["reason"]
    assert rows[1]["reason"] == "needs 45 KV blocks of 16 tokens; there are 40"
    assert "at least one prompt token" in rows[2]["reason"]
    assert rows[3]["reason"] == ""
    for row in rows[:3]:
        assert row["scheduled_ns"] is row["first_token_ns"] is row["finish_ns"] is row["token_times_ns"] is None
    assert done.finished == 1


def test_a_workload_of_nothing_ends_at_once():
    made, sink = cluster()
    assert made.run(private([])).duration_ns == 0
    assert sink.requests.num_rows == sink.steps.num_rows == 0


class Forgetful(VllmScheduler):
    """A policy that admits nobody."""

    def admit_waiting(self, plan, budget):
        pass


def test_a_policy_that_forgets_requests_is_a_bug_that_is_told():
    made = Cluster(Deployment(policy=f"{__name__}:Forgetful"), COST, TableSink(), shares_prefixes=False)
    with pytest.raises(UserError, match="step 0, request 0: plans nothing while it waits"):
        made.run(private(requests(2)))


# What is recorded


@pytest.mark.parametrize("steps, tokens", [(True, True), (True, False), (False, True), (False, False)])
def test_a_recording_has_the_schema_and_gives_metrics(tmp_path, steps, tokens):
    workload = Workload(requests(300), name="three hundred", shares_prefixes=False)
    deployment = Deployment(scheduler=SchedulerConfig(max_model_len=1024, num_blocks=90))
    done = simulate_to(tmp_path / "run", workload, deployment, COST, replicas=2, steps=steps, tokens=tokens)
    recording = Recording.load(tmp_path / "run")
    for dataset, table in (("requests", recording.requests), ("steps", recording.steps)):
        schema = arrow_schema(dataset)
        for name in table.column_names:
            assert table.schema.field(name).type == schema.field(name).type
    assert recording.run["clock"] == "virtual" and recording.run["duration_ns"] == done.duration_ns
    assert recording.requests.num_rows == done.finished == 300
    assert recording.steps.num_rows == (done.steps if steps else 0)
    assert done.output_tokens == sum(r.output_len for r in workload.requests)
    metrics = RunMetrics.from_recording(recording)
    assert metrics.statuses() == {"finished": 300}
    assert metrics.distribution("ttft_ms").count == 300
    assert metrics.distribution("e2e_ms").p50 > metrics.distribution("ttft_ms").p50 > 0
    if steps:
        assert metrics.distribution("step_ms").count == done.steps


def test_steps_and_requests_tell_one_story():
    """Every output token of a request is the end of a step on its replica that had a row of it."""
    made, sink = cluster(replicas=2, tokens=True, num_blocks=90, max_num_batched_tokens=256)
    made.run(private(requests(200)))
    ends = {}
    tokens = Counter()
    for step in sink.steps.to_pylist():
        assert sum(step["row_tokens"]) == step["prefill_tokens"] + step["decode_rows"]
        assert len(step["row_ids"]) == step["prefill_rows"] + step["decode_rows"]
        for id, count in zip(step["row_ids"], step["row_tokens"], strict=True):
            ends.setdefault(id, set()).add(step["end_ns"])
            tokens[id] += count
    for row in sink.requests.to_pylist():
        times = row["token_times_ns"]
        assert len(times) == len(set(times)) == row["output_tokens"]
        assert times == sorted(times) and set(times) <= ends[row["request_id"]]
        assert (times[0], times[-1]) == (row["first_token_ns"], row["finish_ns"])
        computed = row["prompt_tokens"] + row["output_tokens"] - 1 - row["prefix_hit_tokens"]
        assert tokens[row["request_id"]] == computed + row["recomputed_tokens"]
    assert sum(sink.requests["preemptions"].to_pylist()) > 0


def test_without_steps_the_requests_are_the_same():
    tables = []
    for steps in (True, False):
        made, sink = cluster(replicas=2, steps=steps, num_blocks=90)
        made.run(private(requests(300)))
        tables.append(sink.requests)
    assert tables[0].equals(tables[1])


RECORD = """
import sys
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.synth import parse_spec, synthesise
spec = parse_spec({
    "requests": 250, "seed": 5, "arrivals": {"kind": "poisson", "rate": 30}, "prompt": 150,
    "output": {"kind": "exponential", "mean": 40}, "system_prompts": {"count": 5, "tokens": 64},
})
for loop in ("plain", "overlapped"):
    scheduler = SchedulerConfig(max_model_len=2048, num_blocks=140, max_num_seqs=32,
                                async_scheduling=loop == "overlapped")
    simulate_to(f"{sys.argv[1]}/{loop}/run", synthesise(spec), Deployment(scheduler=scheduler),
                TokenCost(6000000, 18000, 450, 100000), steps=True, tokens=True,
                fleet=FleetConfig(pools=(PoolConfig(replicas=3),), router=RouterConfig(name="least-tokens")))
"""


def run_python(source, *arguments, **environment):
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_bytes_in_another_process(tmp_path):
    for seed in "12":
        run_python(RECORD, tmp_path / seed, PYTHONHASHSEED=seed)
    for loop in ("plain", "overlapped"):
        first, second = (digest(tmp_path / seed / loop / "run") for seed in "12")
        assert first == second and len(first) >= 3


# What it costs


@pytest.mark.parametrize(
    "plan_ns, steps, overlapped",
    [(0, True, False), (1000, True, False), (0, False, False), (0, True, True)],
    ids=["plain", "with CPU time", "leaping", "overlapped"],
)
def test_a_step_costs_at_most_one_event(plan_ns, steps, overlapped):
    """On top: an arrival is one event, one more if it finds its replica idle; the end of arrivals is two."""
    cost = TokenCost(6 * MS, 18_000, 450, plan_ns=plan_ns)
    made, _ = cluster(cost, replicas=2, steps=steps, async_scheduling=overlapped)
    events = 0
    event = made._clock.step

    def counted():
        nonlocal events
        events += 1
        event()

    made._clock.step = counted
    done = made.run(private(requests(400, rate_per_s=40)))
    assert done.finished <= events <= done.steps + 2 * 400 + 2
    if not steps:
        assert events < 0.6 * done.steps


STREAM = """
import resource, sys
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.cost_model import TokenCost
from tokentwin.sim.cluster import Cluster
from tokentwin.traces.synth import parse_spec, synthesise

def most_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

class Discard:
    rows = few = 0
    def add_requests(self, columns):
        self.rows += len(columns["request_id"])
        if not self.few and self.rows >= count / 6: self.few = most_mib()
    def add_steps(self, columns): raise AssertionError("steps are not kept")

count = int(sys.argv[1])
spec = parse_spec({
    "requests": count, "arrivals": {"kind": "poisson", "rate": 400},
    "prompt": {"kind": "exponential", "mean": 100, "max": 1000}, "output": {"kind": "exponential", "mean": 15},
})
sink = Discard()
cluster = Cluster(Deployment(scheduler=SchedulerConfig()), TokenCost(6000000, 18000, 450), sink,
                  replicas=8, shares_prefixes=False, steps=False)
cluster.run(synthesise(spec))
assert sink.rows == count
print(sink.few, most_mib())
"""


@pytest.mark.statistical
def test_memory_does_not_grow_with_the_number_of_requests():
    """After a sixth of a run the process is as large as it gets: what is kept of a request is under 200 bytes."""
    count = simulated(120_000)
    few, many = map(float, run_python(STREAM, count).split())
    assert (many - few) * 2**20 < 200 * count, (
        f"{few:.0f} MiB after a sixth of {count:,} requests, {many:.0f} MiB at the end"
    )
