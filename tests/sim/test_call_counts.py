"""What a simulation costs, in Python calls, which unlike seconds are the same on every machine."""

import sys

import pytest

from serving.cost_model import TokenCost
from serving.deployments.config import Deployment, SchedulerConfig
from serving.workload import Workload, WorkloadRequest
from sim.cluster import Cluster
from sim.run_log import TableSink

pytestmark = pytest.mark.pure

COUNT = 100
REQUESTS = [
    WorkloadRequest(i, i * 200_000_000, (("system", 2048), (f"document {i % 40}", 6144), (f"u{i}", 200)), 300)
    for i in range(COUNT)
]


def calls(block_size: int, steps: bool = False) -> int:
    """Calls of Python functions; twice as many tokens as fit are asked for, so that blocks are evicted."""
    limits = SchedulerConfig(
        max_num_batched_tokens=8192, max_model_len=16_384, block_size=block_size, num_blocks=160_000 // block_size
    )
    cost = TokenCost(6_000_000, 18_000, 450)
    cluster = Cluster(Deployment(scheduler=limits), cost, TableSink(), steps=steps, leaps=True)
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        assert cluster.run(Workload(REQUESTS)).finished == COUNT
    finally:
        sys.setprofile(None)
    return counted


def test_a_prompt_costs_its_segments_and_not_its_blocks() -> None:
    calls(16)  # what is imported on first use does not count
    small, large = calls(4), calls(64)
    assert small < 1.1 * large
    assert large < 500 * COUNT


def test_keeping_every_step_costs_at_most_twice_the_calls() -> None:
    calls(16, steps=True)
    assert calls(16, steps=True) < 2 * calls(16)
