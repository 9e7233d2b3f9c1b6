"""The autoscaler: it follows the load, drains before it stops a replica, and what it cost is in the recording."""

from collections import Counter

import pytest

from tests.sim.fleet_samples import MS, FleetRun, S, assert_everything_is_accounted_for, poisson
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.metrics.run_metrics import gpu_hours, replica_counts, serving_ns
from tokentwin.traces.recording import Recording

STEP = TokenCost(10 * MS, 0, 0)


def scaled(metric="queue", target=1.0, **more):
    return {"metric": metric, "target": target, "max_replicas": 8, "interval_s": 1, "cold_start_s": 2} | more


def burst(count, at_s=0.0, output=100, first=0, gap_ns=1):
    return [WorkloadRequest(first + i, round(at_s * S) + i * gap_ns, (("", 10),), output) for i in range(count)]


def test_a_burst_brings_as_many_replicas_as_the_rule_says():
    """One slot: at 1 s, 12 of 13 one-second requests wait, and ceil(1 * 12 / 2) = 6 replicas are wanted."""
    offered = burst(13)
    fleet = {"pools": [{"deployment": {"scheduler": {"max_num_seqs": 1}}}], "router": "least-requests"}
    run = FleetRun(fleet | {"autoscaler": scaled(target=2, interval_s=0.5)}, offered, STEP)
    at = [(life["started_ns"], life["ready_ns"]) for life in run.lives]
    assert at == [(0, 0)] + [(S // 2, 5 * S // 2)] * 5
    assert_everything_is_accounted_for(run, offered)


def test_scaling_stays_between_its_bounds():
    offered = burst(200, output=50)
    run = FleetRun({"autoscaler": scaled(max_replicas=3, min_replicas=2, target=0.1)}, offered, STEP, max_num_seqs=2)
    paid = [row["paid"] for row in replica_counts(run.lives)]
    assert paid[0] == 2 and max(paid) == 3


def test_it_scales_in_one_by_one_after_the_cooldown_and_drains():
    """Idle but for one long request, on one of four: the other three go, 5 s apart."""
    offered = [*burst(8, output=10), WorkloadRequest(8, 100, (("", 10),), 3000), *burst(4, at_s=40.0, first=9)]
    fleet = {"pools": [{"replicas": 4}], "router": "least-requests"}
    run = FleetRun(fleet | {"autoscaler": scaled(cooldown_s=5)}, offered, STEP, max_model_len=8192)
    ended = sorted(life["ended_ns"] for life in run.lives if life["ended_by"] == "scale-in")
    assert ended == [5 * S, 10 * S, 15 * S]
    assert_everything_is_accounted_for(run, offered)
    assert set(run.ends) == {"finished"}


def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new():
    long = [WorkloadRequest(i, i, (("", 10),), 1500) for i in range(2)]  # 15 s, one on each replica
    later = burst(10, at_s=6.0, first=2, output=10)
    fleet = {"pools": [{"replicas": 2}], "router": "least-requests", "autoscaler": scaled(cooldown_s=5)}
    run = FleetRun(fleet, [*long, *later], STEP, max_model_len=8192)
    drained = next(life for life in run.lives if life["ended_by"] == "scale-in")
    assert drained["ended_ns"] == run.rows[drained["replica"]]["finish_ns"] >= 15 * S
    assert {row["replica"] for row in run.rows[2:]} == {1 - drained["replica"]}
    assert_everything_is_accounted_for(run, [*long, *later])


def test_kv_use_brings_replicas_before_anybody_queues():
    offered = poisson(300, 20, prompts=400, outputs=300)
    run = FleetRun({"autoscaler": scaled("kv", 0.3, cooldown_s=1000)}, offered, num_blocks=2001, max_num_seqs=512)
    assert 2 < len(run.lives) <= 8
    assert_everything_is_accounted_for(run, offered)


def test_the_metric_that_wants_most_replicas_decides():
    """Nobody queues at 64 slots, and the KV usage alone brings as many replicas as with a target of its own."""
    offered = poisson(300, 20, prompts=400, outputs=300)
    shape = {"num_blocks": 2001, "max_num_seqs": 512}
    kv = FleetRun({"autoscaler": scaled("kv", 0.3)}, offered, **shape)
    both = scaled() | {"targets": {"queue": 30, "kv": 0.3}}
    del both["metric"], both["target"]
    assert FleetRun({"autoscaler": both}, offered, **shape).lives == kv.lives


def test_the_horizontal_pod_autoscaler_doubles_and_follows_the_queue_of_its_window():
    """One slot and 40 requests of 1 s, all at the first replica: 5, 10 and 16 replicas for a queue of 39 - t.

    60 s later they go: ceil((39 - t) / 2) are wanted at t.
    """
    offered = [*burst(40), *burst(1, at_s=400.0, first=40)]
    fleet = {"pools": [{"deployment": {"scheduler": {"max_num_seqs": 1}}}], "router": "least-requests"}
    hpa = scaled(target=2, cold_start_s=1, cooldown_s=60, rule="hpa", max_replicas=16)
    run = FleetRun(fleet | {"autoscaler": hpa}, offered, STEP)
    assert Counter(life["started_ns"] for life in run.lives) == {0: 1, S: 4, 2 * S: 5, 3 * S: 6}
    ended = Counter(life["ended_ns"] for life in run.lives if life["ended_by"] == "scale-in")
    assert ended == {72 * S: 2} | {at * S: 1 for at in range(74, 100, 2)}
    assert_everything_is_accounted_for(run, offered)


def test_a_pool_scales_to_zero_and_wakes_for_a_request():
    """The weights of Llama-3.1-8B (16.06 GB) take 8.03 s at 2 GB/s, after 2 s."""
    offered = [*burst(1, output=100), *burst(1, at_s=60.5, first=1, output=100)]
    zero = scaled(min_replicas=0, cooldown_s=5, weights_gb_s=2)
    run = FleetRun({"pools": [{"deployment": {"model": "Llama-3.1-8B"}}], "autoscaler": zero}, offered, STEP)
    first, second = run.lives
    assert first["ended_ns"] == 5 * S and second["started_ns"] == 61 * S
    assert second["ready_ns"] - second["started_ns"] == pytest.approx(10.03 * S, rel=2e-3)
    assert run.rows[1]["first_token_ns"] == second["ready_ns"] + 10 * MS
    assert_everything_is_accounted_for(run, offered)


def test_a_late_scrape_acts_later():
    offered = burst(13)
    fleet = {"pools": [{"deployment": {"scheduler": {"max_num_seqs": 1}}}], "router": "least-requests"}
    run = FleetRun(fleet | {"autoscaler": scaled(target=2, scrape_delay_s=1.5)}, offered, STEP)
    assert sorted({life["started_ns"] for life in run.lives})[:2] == [0, 3 * S]


def test_attainment_brings_replicas_until_the_objective_is_met():
    offered = poisson(1500, 30, prompts=50, outputs=60)
    one = {"pools": [{"deployment": {"scheduler": {"max_num_seqs": 8}}}], "router": "least-requests"}
    scaler = scaled("attainment", 0.9, slo_ms={"ttft": 500, "tpot": 50, "e2e": 5000}, cooldown_s=1000)

    def attained(run, of):
        return sum(row["first_token_ns"] - row["arrival_ns"] <= 500 * MS for row in run.rows[-of:]) / of

    alone, helped = FleetRun(one, offered), FleetRun(one | {"autoscaler": scaler}, offered)
    assert attained(alone, 300) < 0.1 and attained(helped, 300) > 0.9
    assert 2 <= len(helped.lives) <= 5


def test_it_replaces_a_crashed_replica_that_has_no_successor():
    offered = poisson(100, 10)
    failures = {"crashes": [{"at_s": 2.5, "recovery_s": None}]}
    run = FleetRun({"failures": failures, "autoscaler": scaled()}, offered)
    assert_everything_is_accounted_for(run, offered)
    assert set(run.ends) == {"finished"}
    assert [(life["started_ns"], life["ready_ns"]) for life in run.lives][:2] == [(0, 0), (3 * S, 5 * S)]


def test_an_autoscaler_ends_with_the_run():
    run = FleetRun({"autoscaler": scaled()}, burst(1))
    assert run.done.duration_ns == run.rows[0]["finish_ns"]
    assert FleetRun({"autoscaler": scaled()}, []).done.duration_ns == 0


# Several pools

APART = [
    {"name": "p", "role": "prefill", "deployment": {"scheduler": {"max_num_seqs": 1}}},
    {"name": "d", "role": "decode", "deployment": {"scheduler": {"max_num_seqs": 4}}},
]
INSTANT = {"links": {"nic_gb_s": 1e9, "kv_bytes_per_token": 1}, "router": "least-requests"}


@pytest.mark.parametrize("output, grows, stays", [(2, "p", "d"), (400, "d", "p")])
def test_each_pool_follows_its_own_load(output, grows, stays):
    """Prompts queue where they are computed one by one, tokens where only four requests decode at once."""
    offered = burst(40, output=output, gap_ns=25 * MS if output > 2 else 1)
    both = [scaled(target=2, pool=pool, interval_s=interval_s) for pool, interval_s in (("p", 0.1), ("d", 0.15))]
    run = FleetRun({"pools": APART, "autoscaler": both} | INSTANT, offered, STEP)
    started = Counter(life["pool"] for life in run.lives)
    assert started[grows] > 1 and started[stays] == 1
    assert_everything_is_accounted_for(run, offered)
    alone = FleetRun(
        {"pools": APART, "autoscaler": next(s for s in both if s["pool"] == grows)} | INSTANT, offered, STEP
    )
    assert run.lives == alone.lives and run.requests.equals(alone.requests)


def test_objectives_of_two_pools_are_counted_apart():
    """Only decodes are too slow, so only their pool grows."""
    offered = poisson(800, 30, prompts=20, outputs=60)
    objectives = {"d": {"tpot": 30}, "p": {"ttft": 5000}}
    both = [scaled("attainment", 0.9, pool=pool, slo_ms=slo_ms, cooldown_s=1000) for pool, slo_ms in objectives.items()]
    run = FleetRun({"pools": APART, "autoscaler": both} | INSTANT, offered, TokenCost(2 * MS, MS, 0), max_num_seqs=64)
    started = Counter(life["pool"] for life in run.lives)
    assert started["p"] == 1 < started["d"]


def test_autoscalers_do_not_keep_one_another_going():
    """Nobody is ever scheduled: the run ends with an error, not never."""
    fleet = {
        "pools": [{"name": "a"}, {"name": "b"}],
        "autoscaler": [scaled(pool="a"), scaled(pool="b", interval_s=0.7)],
    }
    with pytest.raises(UserError, match="plans nothing while"):
        FleetRun(fleet, burst(2), STEP, policy="tests.sim.test_fleet_autoscaler:Idle")


class Idle(VllmScheduler):
    """A policy that plans no work."""

    def schedule(self):
        return StepPlan(0, self.decodes, 0)


# What it cost


def test_gpu_hours_and_the_timeline_follow_the_fleet(tmp_path):
    from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
    from tokentwin.serving.deployments.fleet import FleetConfig

    fleet = FleetConfig.model_validate(
        {"pools": [{"replicas": 2}], "failures": {"crashes": [{"at_s": 2, "recovery_s": 3}]}}
    )
    deployment = Deployment(tensor_parallel_size=4, fleet=fleet, scheduler=SchedulerConfig(max_model_len=1024))
    workload = Workload(burst(5, at_s=9.0), shares_prefixes=False)
    done = simulate_to(tmp_path / "run", workload, deployment, STEP)
    run = Recording.load(tmp_path / "run").run
    lives, duration_ns = run["replica_lives"], run["duration_ns"]
    assert duration_ns == done.duration_ns and run["replicas"] == 2
    # one replica throughout, one to 2 s, one from 2 s on, paid for while it recovers
    assert gpu_hours(lives, duration_ns) == pytest.approx(4 * 2 * duration_ns / 3.6e12)
    assert serving_ns(lives, duration_ns) == 2 * duration_ns - 3 * S
    assert replica_counts(lives) == [
        {"time_ns": 0, "pool": "pool", "paid": 2, "ready": 2},
        {"time_ns": 2 * S, "pool": "pool", "paid": 2, "ready": 1},
        {"time_ns": 5 * S, "pool": "pool", "paid": 2, "ready": 2},
    ]


def test_gpu_hours_are_the_area_under_the_timeline():
    offered = poisson(400, 20, prompts=300, outputs=200)
    run = FleetRun({"autoscaler": scaled("kv", 0.2, cooldown_s=2)}, offered, num_blocks=1001)
    timeline = replica_counts(run.lives)
    ends = [row["time_ns"] for row in timeline[1:]] + [run.done.duration_ns]
    for name, total in (
        ("paid", gpu_hours(run.lives, run.done.duration_ns) * 3.6e12),
        ("ready", serving_ns(run.lives, run.done.duration_ns)),
    ):
        area = sum(row[name] * (end - row["time_ns"]) for row, end in zip(timeline, ends, strict=True))
        assert area == pytest.approx(total)
    assert any(life["ended_by"] == "scale-in" for life in run.lives)
