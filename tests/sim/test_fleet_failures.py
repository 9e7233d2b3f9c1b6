"""Failures: what was on a crashed replica starts again elsewhere, and a slow one is slow as told. Pools that differ."""

import numpy as np
import pytest

from tests.budget import simulated, within
from tests.sim.fleet_samples import MS, ONE_SLOT, FleetRun, assert_everything_is_accounted_for, poisson
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.fleet import PricedPool

STEP = TokenCost(10 * MS, 0, 0)


def crash(at_s, replica=0, recovery_s=None, **more):
    return {"at_s": at_s, "replica": replica, "recovery_s": recovery_s, **more}


def test_requests_of_a_crashed_replica_start_again_elsewhere():
    offered = [WorkloadRequest(i, i, (("", 10),), 30) for i in range(4)]
    fleet = {"pools": [{"replicas": 2}], "failures": {"crashes": [crash(0.155, replica=1)]}}
    run = FleetRun(fleet, offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    stayed, moved = run.rows[::2], run.rows[1::2]
    assert [row["attempts"] for row in stayed + moved] == [1, 1, 2, 2]
    assert {row["replica"] for row in run.rows} == {0}
    for row in moved:  # from scratch: they join the step after the one that runs, and make 30 tokens
        assert row["queued_ns"] == 155 * MS and row["scheduled_ns"] == 160 * MS
        assert row["first_token_ns"] == 170 * MS and row["finish_ns"] == 460 * MS
    assert run.lives[1]["ended_ns"] == 155 * MS and run.lives[1]["ended_by"] == "crash"
    assert run.lives[0]["ended_ns"] is None and len(run.lives) == 2


def test_a_successor_is_ready_after_the_recovery_and_others_wait_for_it():
    offered = [WorkloadRequest(i, i * 100 * MS, (("", 10),), 5) for i in range(6)]
    run = FleetRun({"failures": {"crashes": [crash(0.13, recovery_s=0.4)]}}, offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    second = run.lives[1]
    assert (second["started_ns"], second["ready_ns"], second["ended_by"]) == (130 * MS, 530 * MS, "")
    assert [row["replica"] for row in run.rows] == [0, 1, 1, 1, 1, 1]
    assert {row["queued_ns"] for row in run.rows[1:]} == {530 * MS}
    assert {row["attempts"] for row in run.rows[2:]} == {1}  # held at the gateway, not refused


def test_without_a_successor_the_rest_is_rejected():
    offered = [WorkloadRequest(i, i * 100 * MS, (("", 10),), 5) for i in range(6)]
    run = FleetRun({"failures": {"crashes": [crash(0.13)]}}, offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    assert [row["status"] for row in run.rows] == ["finished"] + ["rejected"] * 5
    assert {row["reason"] for row in run.rows[1:]} == {"no replica is left"}


def test_a_successor_can_crash_too():
    offered = [WorkloadRequest(i, i * 10 * MS, (("", 10),), 5) for i in range(3)]
    crashes = [crash(0.0, recovery_s=1), crash(1.015)]
    run = FleetRun({"failures": {"crashes": crashes}}, offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    assert run.ends["rejected"] == 3 and {row["end_ns"] for row in run.rows} == {1015 * MS}
    assert {row["attempts"] for row in run.rows} == {2}


def test_a_crash_of_nobody_befalls_nobody():
    offered = poisson(50, 50)
    calm = FleetRun({"pools": [{"replicas": 2}]}, offered)
    spared = FleetRun({"pools": [{"replicas": 2}], "failures": {"crashes": [crash(0.2, replica=2)]}}, offered)
    assert calm.requests.equals(spared.requests) and calm.lives == spared.lives


def test_drawn_crashes_come_at_their_rate_and_depend_on_their_seed_alone():
    """About T / (mtbf + recovery) crashes in T replica-seconds, and availability mtbf / (mtbf + recovery)."""
    offered = poisson(3000, 3.0, prompts=5, outputs=2)
    failures = {"mtbf_s": 20, "recovery_s": 5, "seed": 3}
    runs = [
        FleetRun({"pools": [{"replicas": 10}], "failures": failures, "router": router}, offered)
        for router in ("random", "least-requests")
    ]
    lives = [[(life["started_ns"], life["ready_ns"]) for life in run.lives] for run in runs]
    same = min(map(len, lives)) - 1
    assert lives[0][:same] == lives[1][:same]  # routing has no say in it
    run, seconds = runs[0], runs[0].done.duration_ns / 1e9
    crashes = sum(life["ended_by"] == "crash" for life in run.lives)
    expected = 10 * seconds / 25
    assert abs(crashes - expected) < 4 * np.sqrt(expected)
    up = sum(
        (life["ended_ns"] or run.done.duration_ns) - life["ready_ns"]
        for life in run.lives
        if life["ready_ns"] is not None
    )
    assert up / 1e9 / (10 * seconds) == pytest.approx(20 / 25, abs=0.05)
    assert_everything_is_accounted_for(run, offered)


def test_a_larger_fleet_meets_the_same_crashes_and_those_of_its_own():
    """What a replica more would buy is told by pairs: the places of the smaller fleet crash when they did."""
    offered = poisson(600, 3.0, prompts=5, outputs=2)
    failures = {"mtbf_s": 20, "recovery_s": 5, "seed": 3}

    def crashes(*replicas):
        pools = [{"name": str(number), "replicas": count} for number, count in enumerate(replicas)]
        run = FleetRun({"pools": pools, "failures": failures, "router": "least-requests"}, offered)
        return {(life["pool"], life["ended_ns"]) for life in run.lives if life["ended_ns"] is not None}

    base, more_in_the_first, more_in_the_second = crashes(3, 2), crashes(4, 2), crashes(3, 3)
    until = min(max(at for _, at in each) for each in (base, more_in_the_first, more_in_the_second))
    for larger, pool in ((more_in_the_first, "0"), (more_in_the_second, "1")):
        own = {crash for crash in larger - base if crash[1] < until}
        assert {crash for crash in base if crash[1] < until} < larger
        assert own and {name for name, _ in own} == {pool}
    assert len({at for _, at in base}) == len(base) > 20  # no two places share their draws


def test_a_slow_replica_takes_its_factor_in_its_window():
    """Steps of 10 ms; those planned from 105 to 305 ms take 30 ms."""
    offered = [WorkloadRequest(0, 0, (("", 4),), 40)]
    slowdown = {"at_s": 0.105, "for_s": 0.2, "factor": 3}
    for leaps in (True, False):
        run = FleetRun({"failures": {"slowdowns": [slowdown]}}, offered, STEP, leaps=leaps)
        # 11 steps to 110 ms, 7 slow ones to 320 ms, and 22 more
        assert run.rows[0]["finish_ns"] == (110 + 7 * 30 + 22 * 10) * MS


def test_slowdowns_that_overlap_multiply_and_leave_no_trace():
    offered = [WorkloadRequest(0, 0, (("", 4),), 40)]
    slowdowns = [{"at_s": 0.1, "for_s": 0.3, "factor": 3}, {"at_s": 0.16, "for_s": 0.1, "factor": 2}]
    run = FleetRun({"failures": {"slowdowns": slowdowns}}, offered, STEP)
    # 10 steps to 100, 2 of 30 to 160, 2 of 60 to 280, 4 of 30 to 400, and 22 of 10
    assert run.rows[0]["finish_ns"] == (100 + 60 + 120 + 120 + 220) * MS


# Pools that differ


def test_each_pool_has_its_own_deployment_and_cost():
    pools = [
        {"name": "fast", "slo_classes": ["a"], "speed": 2.0},
        {"name": "slow", "slo_classes": ["b"], "deployment": {"scheduler": {"max_num_seqs": 1}}},
    ]
    offered = [WorkloadRequest(i, i, (("", 10),), 10, slo_class="ab"[i % 2]) for i in range(4)]
    run = FleetRun({"pools": pools}, offered, STEP)
    # the fast pool: 5 ms a step, both requests in a batch from the second step on; the slow one: one after the other
    assert [row["finish_ns"] for row in run.rows] == [50 * MS, 100 * MS + 1, 55 * MS, 200 * MS + 1]
    assert [life["pool"] for life in run.lives] == ["fast", "slow"]


def test_pools_can_be_priced_one_by_one():
    fleet = {"pools": [{"name": "x"}, {"name": "y"}]}
    plain = FleetRun(fleet, [])
    deployments = [plain.cluster._fleet.pools[0].deployment] * 2
    costs = TokenCost(10 * MS, 0, 0), TokenCost(70 * MS, 0, 0)
    pools = [PricedPool(p, d, c) for p, d, c in zip(plain.fleet.pools, deployments, costs, strict=True)]
    run = FleetRun(fleet, [WorkloadRequest(i, 0, (("", 3),), 1) for i in range(2)], pools=pools)
    assert [row["finish_ns"] for row in run.rows] == [10 * MS, 70 * MS]


@pytest.mark.statistical
def test_a_heterogeneous_pair_behind_chance_is_two_m_m_1_queues():
    """Split evenly, one pool twice as fast: sojourns 1 / (mu - lambda / 2) with mu = 1 and 2."""
    rho, count = 1.2, simulated(40_000)
    prompts = np.random.default_rng(1).geometric(1 / 1000, count)
    offered = poisson(count, rho * 1e3, 2, prompts=prompts, outputs=1)
    pools = [{"name": "one"}, {"name": "two", "speed": 2.0}]
    run = FleetRun({"pools": pools, "router": "random"}, offered, TokenCost(0, 1000, 0), **ONE_SLOT)
    sojourn, replica = run.column("end_ns") - run.column("arrival_ns"), run.column("replica")
    for index, mu in ((0, 1.0), (1, 2.0)):
        assert sojourn[replica == index].mean() / MS == pytest.approx(1 / (mu - rho / 2), rel=within(0.08))
