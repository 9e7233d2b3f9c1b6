"""A request whose grammar is being compiled waits, and others pass it."""

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
COST = TokenCost(10 * MS, 0, 0)


def rows(requests, policy="vllm", fleet=None, **scheduler):
    sink = TableSink()
    settings = {"max_model_len": 100, "max_num_seqs": 2, "static_timeout_ms": 1, "edf_ttft_ms": {"": 9}, **scheduler}
    deployment = Deployment(policy=policy, scheduler=SchedulerConfig(**settings))
    Cluster(deployment, COST, sink, fleet=fleet, shares_prefixes=False).run(Workload(requests, shares_prefixes=False))
    return {row["request_id"]: row for row in sink.requests.to_pylist()}


def request(id, arrival_ms=0, compile_ms=0, **more):
    return WorkloadRequest(id, arrival_ms * MS, (("", 5),), 4, grammar_compile_ns=round(compile_ms * MS), **more)


def test_others_pass_it_and_it_keeps_its_place():
    slow, *others = (request(0, 0, 25), request(1, 0), request(2, 0), request(3, 1))
    seen = rows([slow, *others])
    assert [seen[id]["scheduled_ns"] // MS for id in range(4)] == [40, 0, 0, 40]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("overlapped", [False, True])
def test_nobody_runs_before_its_grammar_is_there_whatever_the_policy(policy, overlapped):
    compiles = [17.3, 0, 300, 1e-6, 40, 0, 9]
    seen = rows(
        [request(id, 3 * id, ms, structured=ms > 0) for id, ms in enumerate(compiles)],
        policy,
        async_scheduling=overlapped,
    )
    assert {row["status"] for row in seen.values()} == {"finished"}
    for id, ms in enumerate(compiles):
        assert seen[id]["scheduled_ns"] >= seen[id]["queued_ns"] + round(ms * MS)


def test_one_that_leaves_or_whose_replica_crashes_meanwhile_is_no_trouble():
    fleet = FleetConfig(failures={"crashes": [{"at_s": 0.02, "replica": 0, "recovery_s": 0.01}]})
    seen = rows([request(0, 0, 30), request(1, 0, 100, cancel_ns=50 * MS), request(2, 0, 5)], fleet=fleet)
    assert [seen[id]["status"] for id in range(3)] == ["finished", "cancelled", "finished"]
    assert seen[0]["attempts"] == 2
    assert seen[0]["scheduled_ns"] == 65 * MS  # crashed at 20, there again at 30, compiled at 60
