"""What a simulation costs, in calls, which unlike seconds are the same on every machine."""

import sys
from dataclasses import replace

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

pytestmark = pytest.mark.pure

COUNT = 100
REQUESTS = [
    WorkloadRequest(i, i * 200_000_000, (("system", 2048), (f"document {i % 40}", 6144), (f"u{i}", 200)), 300)
    for i in range(COUNT)
]


def calls(block_size: int, steps: bool = False, windows: tuple[int, ...] = (), output_len: int = 300) -> int:
    """Count calls of Python and C functions; requests have twice the tokens that fit, so that blocks are evicted."""
    limits = SchedulerConfig(
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        block_size=block_size,
        num_blocks=(len(windows) or 1) * 160_000 // block_size,
        kv_groups=windows,
    )
    cost = TokenCost(6_000_000, 18_000, 450)
    cluster = Cluster(Deployment(scheduler=limits), cost, TableSink(), steps=steps, leaps=True)
    return counted(cluster, [replace(request, output_len=output_len) for request in REQUESTS])


def calls_of_fleet(replicas: int) -> float:
    """Count calls for 40 requests a replica, all with equal work, behind a router that looks at loads."""
    limits = SchedulerConfig(max_num_batched_tokens=512, max_model_len=16_384, num_blocks=8192)
    fleet = FleetConfig.model_validate({"pools": [{"replicas": replicas}], "router": "least-requests"})
    cost = TokenCost(6_000_000, 18_000, 450)
    cluster = Cluster(Deployment(scheduler=limits), cost, TableSink(), fleet=fleet, shares_prefixes=False, steps=False)
    gap_ns = 100_000_000 // replicas
    count = 40 * replicas
    requests = [WorkloadRequest(i, i * gap_ns, (("", 200 + 37 * i % 1500),), 1 + 53 * i % 400) for i in range(count)]
    return counted(cluster, requests) / count


def counted(cluster: Cluster, requests: list[WorkloadRequest]) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        assert cluster.run(Workload(requests)).finished == len(requests)
    finally:
        sys.setprofile(None)
    return calls


def test_a_prompt_costs_its_segments_and_not_its_blocks() -> None:
    calls(16)  # what is imported on first use does not count
    small, large = calls(4), calls(64)
    assert small < 1.1 * large
    assert large < 610 * COUNT


def test_a_prompt_behind_windows_costs_its_segments_too() -> None:
    calls(16, windows=(512, 0))
    small, large = (calls(size, windows=(512, 0), output_len=1) for size in (4, 64))
    assert small < 1.1 * large
    assert large < 530 * COUNT


def test_keeping_every_step_costs_at_most_a_fifth_more_calls() -> None:
    calls(16, steps=True)
    assert calls(16, steps=True) < 1.2 * calls(16)


def test_a_request_costs_the_same_in_a_fleet_of_any_size() -> None:
    calls_of_fleet(1)
    small, large = calls_of_fleet(1), calls_of_fleet(20)
    assert large < 1.1 * small
    assert small < 550
