"""The speed of the simulator: requests, engine steps and tokens per CPU second, and peak memory.

    python -m lab.benchmarks.sim_speed                 # 160,000 requests on 16 replicas
    python -m lab.benchmarks.sim_speed --million       # a million on 1,000 replicas, behind least-requests
    python -m lab.benchmarks.sim_speed --fleets        # 20,000 requests each on 1 to 1,000 replicas, every router
    python -m lab.benchmarks.sim_speed --policy vllm --policy sglang    # the same with several policies

Every replica gets the same load, so a request takes the same work in all fleets, except for its routing. Rows of
finished requests are dropped. The CPU time includes generating the workload, which happens during the simulation, but
not creating the replicas. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.router import ROUTERS
from tokentwin.tables import print_table

FLEETS = (1, 10, 100, 1000)
RATE_PER_S = 9.0  # requests at each replica
MEAN_PROMPT, MAX_PROMPT = 950, 7000
MEAN_OUTPUT, MAX_OUTPUT = 200, 4000
PREFIXES = 5000  # number of different prompt prefixes, for routers that choose by prefix
BY_PREFIX = ("prefix-affinity", "session-sticky")
CHUNK = 10_000
SCHEDULER = SchedulerConfig(
    max_num_batched_tokens=512, block_size=16, max_model_len=16_384, num_blocks=8192, max_num_seqs=256
)
COST = TokenCost(6_000_000, 18_000, 450)


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals, lognormal prompts and exponential outputs, generated in chunks when they are needed."""

    requests: int
    replicas: int
    named: bool  # true if a prompt begins with one of the prefixes

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng = np.random.default_rng(0)
        mean_log = np.log(MEAN_PROMPT) - 0.5
        clock_ns = 0.0
        for first in range(0, self.requests, CHUNK):
            count = min(CHUNK, self.requests - first)
            arrivals = clock_ns + np.cumsum(rng.exponential(1e9 / (RATE_PER_S * self.replicas), count))
            clock_ns = float(arrivals[-1])
            prompts = np.clip(rng.lognormal(mean_log, 1.0, count), 1, MAX_PROMPT)
            outputs = np.clip(rng.exponential(MEAN_OUTPUT, count), 1, MAX_OUTPUT)
            columns = (column.astype(np.int64).tolist() for column in (arrivals, prompts, outputs))
            for id, (arrival, prompt, output) in enumerate(zip(*columns, strict=True), first):
                key = f"p{id % PREFIXES}" if self.named else ""
                yield WorkloadRequest(id, arrival, ((key, prompt),), output, session=key)


class Discard:
    """A sink that keeps nothing."""

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        pass

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        pass


def measure(requests: int, replicas: int, router: str, policy: str) -> dict[str, Any]:
    """Return one run as a row of the table."""
    fleet = FleetConfig.model_validate({"pools": [{"replicas": replicas}], "router": router})
    deployment = Deployment(policy=policy, scheduler=SCHEDULER)
    cluster = Cluster(deployment, COST, Discard(), fleet=fleet, shares_prefixes=False, steps=False)
    began = time.process_time()
    done = cluster.run(Workload(Poisson(requests, replicas, router in BY_PREFIX), shares_prefixes=False))
    cpu_s = time.process_time() - began
    assert done.finished == requests
    return {
        "policy": policy,
        "router": router,
        "replicas": replicas,
        "requests": requests,
        "CPU s": round(cpu_s, 2),
        "us/request": round(1e6 * cpu_s / requests, 1),
        "requests/CPU s": round(requests / cpu_s),
        "steps/CPU s": round(done.steps / cpu_s),
        "tokens/CPU s": round(done.output_tokens / cpu_s),
        "peak MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", action="store_true", help="simulate 1,000,000 requests on 1,000 replicas")
    parser.add_argument(
        "--fleets", action="store_true", help="simulate 20,000 requests on 1, 10, 100 and 1,000 replicas"
    )
    parser.add_argument(
        "--router", action="append", choices=sorted(ROUTERS), help="router to use; by default all routers with --fleets"
    )
    parser.add_argument("--policy", action="append", help="scheduling policy of every replica (vllm); may be repeated")
    options = parser.parse_args()
    sizes, routers = [(160_000, 16)], ["round-robin"]
    if options.million:
        sizes, routers = [(1_000_000, 1000)], ["least-requests"]
    elif options.fleets:
        sizes, routers = [(20_000, replicas) for replicas in FLEETS], list(ROUTERS)
    results = [
        measure(*size, router, policy)
        for router in options.router or routers
        for size in sizes
        for policy in options.policy or ["vllm"]
    ]
    print_table(list(results[0]), [[str(value) for value in result.values()] for result in results])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
