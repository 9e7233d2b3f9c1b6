"""What a request costs to simulate as the fleet grows, by router, and the largest run on one core.

    python benchmarks/fleet_scale.py            # 1 to 1,000 replicas, 20,000 requests each, behind every router
    python benchmarks/fleet_scale.py --million  # 1,000 replicas, 1,000,000 requests, behind least-requests

Every replica gets the same load, so all fleets do the same work for a request but for routing it. Rows are discarded.
The generation of the workload is in the times, making the replicas is not. What has ended so far is said on standard
error. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.cost_model import TokenCost
from serving.deployments.config import Deployment, SchedulerConfig
from serving.deployments.fleet import FleetConfig
from serving.workload import Workload, WorkloadRequest
from sim.cluster import Cluster
from sim.router import ROUTERS

FLEETS = (1, 10, 100, 1000)
REQUESTS = 20_000
RATE_PER_S = 9.0  # at each replica
MEAN_PROMPT, MAX_PROMPT = 950, 7000
MEAN_OUTPUT, MAX_OUTPUT = 200, 4000
PREFIXES = 5000  # different beginnings, for routers that go by them
CHUNK = 10_000


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals, lognormal prompts and exponential outputs, as in `sim_speed.py`."""

    requests: int
    replicas: int
    named: bool  # whether a prompt begins with one of the prefixes

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng = np.random.default_rng(0)
        clock_ns = 0.0
        for first in range(0, self.requests, CHUNK):
            count = min(CHUNK, self.requests - first)
            arrivals = clock_ns + np.cumsum(rng.exponential(1e9 / (RATE_PER_S * self.replicas), count))
            clock_ns = float(arrivals[-1])
            prompts = np.clip(rng.lognormal(np.log(MEAN_PROMPT) - 0.5, 1.0, count), 1, MAX_PROMPT)
            outputs = np.clip(rng.exponential(MEAN_OUTPUT, count), 1, MAX_OUTPUT)
            columns = (column.astype(np.int64).tolist() for column in (arrivals, prompts, outputs))
            for id, (arrival, prompt, output) in enumerate(zip(*columns, strict=True), first):
                key = f"p{id % PREFIXES}" if self.named else ""
                yield WorkloadRequest(id, arrival, ((key, prompt),), output, session=key)


class Discard:
    """A sink that keeps nothing, and says on standard error how many of `requests` have ended, twenty times."""

    def __init__(self, title: str, requests: int) -> None:
        self._title = title
        self._requests = requests
        self._ended = self._said = 0
        self._began = time.perf_counter()

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._ended += len(columns["request_id"])
        if self._ended >= self._said + self._requests / 20:
            self._said = self._ended
            wall_s = time.perf_counter() - self._began
            print(f"{self._title}: {self._ended:,} of {self._requests:,}, {wall_s:.0f} s", file=sys.stderr, flush=True)

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        pass


def measure(router: str, replicas: int, requests: int) -> dict[str, Any]:
    scheduler = SchedulerConfig(
        max_num_batched_tokens=512, block_size=16, max_model_len=16_384, num_blocks=8192, max_num_seqs=256
    )
    fleet = FleetConfig.model_validate({"pools": [{"replicas": replicas}], "router": router})
    cost = TokenCost(6_000_000, 18_000, 450)
    sink = Discard(f"{router}, {replicas} replicas", requests)
    cluster = Cluster(Deployment(scheduler=scheduler), cost, sink, fleet=fleet, shares_prefixes=False, steps=False)
    began, began_cpu = time.perf_counter(), time.process_time()
    named = router in ("prefix-affinity", "session-sticky")
    done = cluster.run(Workload(Poisson(requests, replicas, named), shares_prefixes=False))
    cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
    assert done.finished == requests
    return {
        "router": router,
        "replicas": replicas,
        "requests": requests,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "us_per_request": round(1e6 * cpu_s / requests, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", action="store_true", help="1,000,000 requests on 1,000 replicas")
    parser.add_argument("--router", action="append", choices=sorted(ROUTERS), help="default: all; of a million, one")
    options = parser.parse_args()
    routers = options.router or (["least-requests"] if options.million else list(ROUTERS))
    sizes = [(1000, 1_000_000)] if options.million else [(replicas, REQUESTS) for replicas in FLEETS]
    results = [measure(router, *size) for router in routers for size in sizes]
    table = Table("router", "replicas", "requests", "wall s", "CPU s", "us/request", "peak MB")
    for result in results:
        table.add_row(*map(str, result.values()))
    Console().print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
