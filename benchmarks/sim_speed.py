"""How fast the simulator is: requests, engine steps and tokens per CPU second, and peak memory.

    python benchmarks/sim_speed.py                 # 160,000 requests on 16 replicas
    python benchmarks/sim_speed.py --million       # a million, streamed into a sink that discards

The workload is generated while it is simulated, and its generation is in the CPU time. The last line of output
is one JSON object.
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
import pyarrow as pa
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.cost_model import TokenCost
from serving.deployments.config import Deployment, SchedulerConfig
from serving.workload import PRIVATE, Workload, WorkloadRequest
from sim.cluster import Cluster
from sim.router import find_router
from sim.run_log import RunSink, TableSink

REPLICAS = 16
RATE_PER_S = 9.0  # at each replica
MEAN_PROMPT, MAX_PROMPT = 950, 7000
MEAN_OUTPUT, MAX_OUTPUT = 200, 4000
TARGET_CPU_S, TARGET_MB = 12.0, 1000.0
CHUNK = 10_000


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals, lognormal prompts and exponential outputs, generated in chunks as they are asked for."""

    requests: int
    seed: int

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng = np.random.default_rng(self.seed)
        mean_log = np.log(MEAN_PROMPT) - 0.5
        clock_ns = 0.0
        for first in range(0, self.requests, CHUNK):
            count = min(CHUNK, self.requests - first)
            arrivals = clock_ns + np.cumsum(rng.exponential(1e9 / (RATE_PER_S * REPLICAS), count))
            clock_ns = float(arrivals[-1])
            prompts = np.clip(rng.lognormal(mean_log, 1.0, count), 1, MAX_PROMPT)
            outputs = np.clip(rng.exponential(MEAN_OUTPUT, count), 1, MAX_OUTPUT)
            columns = (column.astype(np.int64).tolist() for column in (arrivals, prompts, outputs))
            for id, (arrival, prompt, output) in enumerate(zip(*columns, strict=True), first):
                yield WorkloadRequest(id, arrival, ((PRIVATE, prompt),), output)


class Discard:
    """A sink that keeps nothing."""

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        pass

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        pass


def measure(requests: int, seed: int, router: str, cost: TokenCost, sink: RunSink) -> dict[str, Any]:
    scheduler = SchedulerConfig(
        max_num_batched_tokens=512, block_size=16, max_model_len=16_384, num_blocks=8192, max_num_seqs=256
    )
    pa.array([0])  # imports pandas, if there is one
    began = time.process_time()
    cluster = Cluster(
        Deployment(policy="vllm", scheduler=scheduler),
        cost,
        sink,
        replicas=REPLICAS,
        router=find_router(router),
        shares_prefixes=False,
        steps=False,
    )
    done = cluster.run(Workload(Poisson(requests, seed), shares_prefixes=False))
    cpu_s = time.process_time() - began
    return {
        "cpu_s": round(cpu_s, 3),
        "requests": done.finished,
        "steps": done.steps,
        "tokens": done.output_tokens,
        "requests_per_cpu_s": round(done.finished / cpu_s),
        "steps_per_cpu_s": round(done.steps / cpu_s),
        "tokens_per_cpu_s": round(done.output_tokens / cpu_s),
        "simulated_s": round(done.duration_ns / 1e9, 3),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def show(result: Mapping[str, Any]) -> None:
    table = Table(title=f"{REPLICAS} replicas, {result['requests']:,} requests", title_justify="left")
    for heading in ("", "total", "per CPU second"):
        table.add_column(heading, justify="right" if heading else "left")
    for unit in ("requests", "steps", "tokens"):
        table.add_row(unit, f"{result[unit]:,}", f"{result[f'{unit}_per_cpu_s']:,}")
    table.add_section()
    for name, field, target in (
        ("CPU time, s", "cpu_s", "target_cpu_s"),
        ("peak memory, MB", "peak_rss_mb", "target_mb"),
    ):
        table.add_row(name, f"{result[field]:,.1f}", f"target {result[target]:,.0f}" if target in result else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, help="default 160,000")
    parser.add_argument("--million", action="store_true", help="1,000,000 requests, discarded as they end")
    parser.add_argument("--router", default="round-robin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-ns", type=int, default=6_000_000, help="price of a step")
    parser.add_argument("--per-token-ns", type=int, default=18_000, help="price of a token")
    parser.add_argument("--per-pair-ps", type=int, default=450, help="price of a query-key pair")
    options = parser.parse_args()
    cost = TokenCost(options.base_ns, options.per_token_ns, options.per_pair_ps)
    requests = options.requests or (1_000_000 if options.million else 160_000)
    sink = Discard() if options.million else TableSink()
    result = measure(requests, options.seed, options.router, cost, sink)
    result["target_mb"] = TARGET_MB
    if requests == 160_000:
        result["target_cpu_s"] = TARGET_CPU_S
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
