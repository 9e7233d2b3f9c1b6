"""Data-parallel ranks: each has a scheduler of its own, and they are paid for as one engine."""

import pytest

from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import AutoscalerConfig, Crash, FailuresConfig, FleetConfig, PoolConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import gpu_hours

COST = TokenCost(2_000_000, 10_000, 10)
REQUESTS = Workload([WorkloadRequest(id, id * 700_000, (("", 50 + id % 7),), 5 + id % 11) for id in range(90)])


def run(deployment: Deployment, replicas: int) -> tuple[TableSink, float]:
    sink = TableSink()
    cluster = Cluster(deployment, COST, sink, replicas=replicas)
    done = cluster.run(REQUESTS)
    return sink, gpu_hours(cluster.replica_lives, done.duration_ns)


def test_an_engine_of_ranks_is_so_many_schedulers_and_is_paid_for_once() -> None:
    ranks, spent = run(Deployment(data_parallel_size=4, tensor_parallel_size=2), 2)
    alone, other = run(Deployment(tensor_parallel_size=2), 8)
    assert ranks.requests.equals(alone.requests)
    assert spent == pytest.approx(other)


def test_a_priced_fleet_counts_engines_their_ranks_and_gpus() -> None:
    engine = Deployment(model="Qwen3-30B-A3B", device="cuda", data_parallel_size=4, tensor_parallel_size=2)
    priced = price_scenario(Workload([]), None, "H100", engine, replicas=3)
    assert (priced.engines, priced.ranks, priced.gpus) == (3, 12, 24)
    cluster = priced.cluster(Cluster, TableSink())
    assert len(cluster.replicas) == priced.ranks and sum(life["gpus"] for life in cluster.replica_lives) == priced.gpus


def test_ranks_do_not_come_and_go_alone() -> None:
    crashes = FailuresConfig(crashes=(Crash(at_s=1.0),))
    scaler = (AutoscalerConfig(target=4, max_replicas=3),)
    for more in ({"failures": crashes}, {"autoscaler": scaler}):
        fleet = FleetConfig(pools=(PoolConfig(),), **more)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="ranks do not come and go alone"):
            Cluster(Deployment(data_parallel_size=2), COST, TableSink(), fleet=fleet)
