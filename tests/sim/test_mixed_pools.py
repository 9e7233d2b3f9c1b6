"""Pools by the length of a request, and spot replicas that the provider takes back after a notice."""

import numpy as np
import pytest

from tests.sim.fleet_samples import MS, FleetRun, assert_everything_is_accounted_for, poisson
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest

STEP = TokenCost(10 * MS, 0, 0)


def pool(name, **more):
    return {"name": name, **more}


def test_a_request_goes_to_the_first_pool_with_room_for_its_length():
    pools = [
        pool("short", replicas=2, max_prompt_tokens=50),
        pool("also-short", max_prompt_tokens=50),
        pool("small", max_total_tokens=200),
        pool("rest", replicas=2),
    ]
    offered = poisson(400, 100.0, outputs=60)
    run = FleetRun({"pools": pools, "router": "least-requests"}, offered)
    assert_everything_is_accounted_for(run, offered)
    pool_of = {life["replica"]: life["pool"] for life in run.lives}
    for row, request in zip(run.rows, offered, strict=True):
        wanted = ("rest",)
        if request.prompt_len <= 50:
            wanted = ("short", "also-short")
        elif request.prompt_len + request.output_len <= 200:
            wanted = ("small",)
        assert pool_of[row["replica"]] in wanted
    assert {pool_of[row["replica"]] for row in run.rows} == {p["name"] for p in pools}


def test_a_class_keeps_its_pools_and_its_lengths():
    pools = [
        pool("chat-short", slo_classes=["chat"], max_prompt_tokens=100),
        pool("chat-long", slo_classes=["chat"]),
        pool("rest"),
    ]
    chat = [WorkloadRequest(i, i * MS, (("", 40 * (i + 1)),), 5, slo_class="chat") for i in range(6)]
    others = [WorkloadRequest(i, i * MS, (("", 40),), 5) for i in range(6, 9)]
    run = FleetRun({"pools": pools}, chat + others, STEP)
    assert [row["replica"] for row in run.rows] == [0, 0, 1, 1, 1, 1, 2, 2, 2]


SHORT, ALL = pool("short", max_prompt_tokens=9), pool("all")


@pytest.mark.parametrize(
    ("pools", "what"),
    [
        ([SHORT], "no pool takes longer requests than 'short'"),
        ([ALL, SHORT], "no pool takes longer requests than 'short'"),
        ([SHORT, ALL, pool("b", max_prompt_tokens=5), pool("c")], "no pool takes longer requests than 'b'"),
        ([SHORT, pool("c", slo_classes=["c"])], "no pool takes longer requests than 'short'"),
    ],
)
def test_every_length_needs_a_pool(pools, what):
    with pytest.raises(UserError, match=what):
        parse(FleetConfig, {"pools": pools}, where="fleet")


def interrupted(**more):
    return {"pools": [{"replicas": 2}], "failures": {"interruptions": [{"restart_s": None, **more}]}}


def test_after_the_notice_a_replica_gets_nothing_and_what_it_has_not_finished_starts_again_elsewhere():
    offered = [WorkloadRequest(i, i * 100 * MS, (("", 10),), 30) for i in range(8)]  # 300 ms each
    run = FleetRun(interrupted(at_s=[0.35], notice_s=0.2), offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    # Replica 0 has the requests of 0 and 200 ms. The second ends within the notice, and then the replica does.
    assert (run.lives[0]["ended_by"], run.lives[0]["ended_ns"]) == ("interruption", 500 * MS)
    assert [row["replica"] for row in run.rows] == [0, 1, 0, 1, 1, 1, 1, 1]
    assert {row["attempts"] for row in run.rows} == {1}

    hasty = FleetRun(interrupted(at_s=[0.35], notice_s=0.1), offered, STEP)
    assert hasty.lives[0]["ended_ns"] == 450 * MS
    assert [row["attempts"] for row in hasty.rows] == [1, 1, 2, 1, 1, 1, 1, 1]
    assert hasty.rows[2]["replica"] == 1 and hasty.rows[2]["queued_ns"] == 450 * MS


def test_a_successor_is_ready_after_the_restart():
    offered = [WorkloadRequest(i, i * 100 * MS, (("", 10),), 5) for i in range(8)]
    fleet = {"failures": {"interruptions": [{"at_s": [0.12], "notice_s": 0.02, "restart_s": 0.3}]}}
    run = FleetRun(fleet, offered, STEP)
    assert_everything_is_accounted_for(run, offered)
    second = run.lives[1]
    assert (second["started_ns"], second["ready_ns"]) == (120 * MS, 420 * MS)
    assert run.rows[1]["attempts"] == 2  # it had begun at 100 ms, and the notice was too short
    assert {row["queued_ns"] for row in run.rows[2:5]} == {420 * MS}


def test_random_interruptions_come_at_their_rate_and_depend_on_the_seed_alone():
    hour = 3600
    offered = [WorkloadRequest(i, i * hour * 1000 * MS, (("", 10),), 2) for i in range(201)]  # 200 hours

    def ends(seed, replicas=5, per_hour=0.5):
        one = {"per_hour": per_hour, "notice_s": 10, "restart_s": 20}
        fleet = {"pools": [{"replicas": replicas}], "failures": {"interruptions": [one], "seed": seed}}
        run = FleetRun(fleet, offered, STEP)
        return [life["ended_ns"] for life in run.lives if life["ended_by"] == "interruption"]

    taken = ends(1)
    expected = 5 * 0.5 * 200
    assert abs(len(taken) - expected) < 4 * np.sqrt(expected)
    assert taken == ends(1) != ends(2)
    assert set(ends(1, replicas=3)) <= set(taken)  # a replica's interruptions depend on its place alone
