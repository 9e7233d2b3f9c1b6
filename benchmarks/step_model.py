"""What the model of operations costs the simulator, against the three prices of the oracle recordings.

    python benchmarks/step_model.py

The workload of `sim_speed.py` at an eighth of its length, on 16 replicas, with either cost model in turns: CPU time per
engine step, tables included (target: under 5 microseconds more, amortised), and how many steps a CPU second simulates
(target: less than 30 % fewer). The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sim_speed import REPLICAS, Discard, Poisson
from calibration.engine_calibration import EngineCalibration
from calibration.operation_cost import OperationCost
from calibration.predict import blind, kernels
from serving.config import Deployment, SchedulerConfig
from serving.cost_model import CostModel, TokenCost
from serving.model_catalogue import find_model
from serving.workload import Workload
from sim.cluster import Cluster

REQUESTS = 20_000
ROUNDS = 5
DEPLOYMENT = Deployment(
    model="Llama-3.1-8B",
    device="cuda",
    scheduler=SchedulerConfig(
        max_num_batched_tokens=512, block_size=16, max_model_len=16_384, num_blocks=8192, max_num_seqs=256
    ),
)


def operations() -> OperationCost:
    known: EngineCalibration = blind()
    return known.cost(find_model(DEPLOYMENT.model), DEPLOYMENT, kernels("H100"))


def cpu_s_per_step(cost: CostModel) -> float:
    began = time.process_time()
    cluster = Cluster(DEPLOYMENT, cost, Discard(), replicas=REPLICAS, shares_prefixes=False, steps=False)
    done = cluster.run(Workload(Poisson(REQUESTS, 0), shares_prefixes=False))
    return (time.process_time() - began) / done.steps


def main() -> None:
    operations()  # reads the fits of the GPU
    pairs = []
    for _ in range(ROUNDS):
        plain = cpu_s_per_step(TokenCost(6_000_000, 18_000, 450))
        began = time.process_time()
        cost = operations()
        tables_s = time.process_time() - began
        pairs.append((plain, cpu_s_per_step(cost), tables_s))
    plain, full, tables_s = (median(column) for column in zip(*pairs, strict=True))
    fewer = 1 - median(p / f for p, f, _ in pairs)
    print(f"three prices      {1e6 * plain:.2f} µs of CPU a step")
    print(f"operations        {1e6 * full:.2f} µs of CPU a step, {1e3 * tables_s:.0f} ms for its first tables")
    print(f"more per step     {1e6 * (full - plain):.2f} µs (target 5)")
    print(f"steps per second  {100 * fewer:.0f} % fewer (target 30 %)")
    print(json.dumps({"plain_us": 1e6 * plain, "full_us": 1e6 * full, "fewer": fewer, "tables_ms": 1e3 * tables_s}))


if __name__ == "__main__":
    main()
