"""Fleets and workloads that the fleet tests share."""

from collections import Counter

import numpy as np

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

MS, S = 1_000_000, 1_000_000_000
COST = TokenCost(6 * MS, 18_000, 450)
ROOMY = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
ONE_SLOT = {"max_num_seqs": 1, "max_num_batched_tokens": 100_000, "max_model_len": 100_000, "num_blocks": 10_000}
ENDS = ("finished", "rejected", "timed_out", "cancelled")


def poisson(count, rate_per_s, seed=0, prompts=None, outputs=None, **more):
    """Return Poisson arrivals, with lognormal prompts and exponential outputs unless given; nothing is shared."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(S / rate_per_s, count)).astype(int).tolist()
    prompts = np.clip(rng.lognormal(4.5, 1.0, count), 1, 700).astype(int) if prompts is None else prompts
    outputs = np.clip(rng.exponential(50, count), 1, 300).astype(int) if outputs is None else outputs
    sizes = zip(np.broadcast_to(prompts, count).tolist(), np.broadcast_to(outputs, count).tolist(), strict=True)
    return [
        WorkloadRequest(i, at, (("", p),), o, **more)
        for i, (at, (p, o)) in enumerate(zip(arrivals, sizes, strict=True))
    ]


class FleetRun:
    """A simulated fleet; `rows` are the requests in the order of their ids."""

    def __init__(
        self,
        fleet,
        requests,
        cost=COST,
        *,
        leaps=True,
        concurrency=None,
        pools=None,
        policy="vllm",
        shares_prefixes=False,
        **scheduler,
    ):
        self.fleet = parse(FleetConfig, fleet, where="fleet")
        keeps = {key: scheduler.pop(key) for key in ("steps", "tokens") if key in scheduler}
        sink = TableSink()
        deployment = Deployment(policy=policy, scheduler=SchedulerConfig(**(ROOMY | scheduler)))
        self.cluster = Cluster(
            deployment,
            cost,
            sink,
            fleet=self.fleet,
            pools=pools,
            shares_prefixes=shares_prefixes,
            **({"steps": False} | keeps),
        )
        if not leaps:
            self._never_leap()
        self.done = self.cluster.run(Workload(requests, concurrency=concurrency, shares_prefixes=shares_prefixes))
        self.requests, self.steps = sink.requests, sink.steps
        self.rows = sink.requests.sort_by("request_id").to_pylist()
        self.lives = self.cluster.replica_lives

    def _never_leap(self):
        fleet = self.cluster._fleet
        new = fleet._new

        def stepping(pool, after=None):
            life = new(pool, after)
            life.replica._leaps = False
            return life

        fleet._new = stepping
        for replica in fleet.replicas:
            replica._leaps = False

    @property
    def ends(self):
        return Counter(row["status"] for row in self.rows)

    def column(self, name):
        return np.array([row[name] for row in self.rows])


def assert_everything_is_accounted_for(run, offered):
    """Assert that no request disappears, and that nothing is left behind on any replica."""
    assert [row["request_id"] for row in run.rows] == sorted(request.id for request in offered)
    assert set(run.ends) <= set(ENDS)
    assert sum(run.ends.values()) == len(offered)
    for row in run.rows:
        assert (row["finish_ns"] is not None) == (row["status"] == "finished") == (row["reason"] == "")
        assert row["end_ns"] >= row["arrival_ns"] and row["attempts"] >= 1
    assert run.cluster._log.queued == 0
    for replica in run.cluster.replicas:
        assert replica.outstanding_requests == replica.outstanding_tokens == replica.known_tokens == 0
        assert not replica.scheduler.requests and replica.scheduler.pool.free == replica.scheduler.pool.total
