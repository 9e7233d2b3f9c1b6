"""How much the cost model of operations slows the simulator down, compared with a cost model of three constants.

    python -m lab.benchmarks.step_model

It runs the workload of `sim_speed.py` at an eighth of its length, on 16 replicas, with the two cost models in turns. It
measures CPU time, including the time to build the tables. The target is under 5 microseconds more per engine step,
amortised, and less than 30 % fewer requests per CPU second. Steps per second cannot be compared: the two engines batch
differently. The last line is one JSON object.
"""

from __future__ import annotations

import json
import time
from statistics import median

from lab.benchmarks.sim_speed import SCHEDULER, Discard, Poisson
from tokentwin.calibration.steps.external_calibration import ExternalCalibration, blind, kernels
from tokentwin.calibration.steps.observed import ObservedOperations
from tokentwin.serving.cost_model import CostModel, TokenCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster

REQUESTS, REPLICAS = 20_000, 16
ROUNDS = 5
DEPLOYMENT = Deployment(model="Llama-3.1-8B", device="cuda", scheduler=SCHEDULER)


def operations() -> ObservedOperations:
    known: ExternalCalibration = blind("H100", DEPLOYMENT)
    return ObservedOperations(known.cost(find_model(DEPLOYMENT.model), DEPLOYMENT, kernels("H100")))


def simulate(cost: CostModel) -> tuple[float, int]:
    """Return CPU seconds and the number of engine steps."""
    began = time.process_time()
    cluster = Cluster(DEPLOYMENT, cost, Discard(), replicas=REPLICAS, shares_prefixes=False, steps=False)
    done = cluster.run(Workload(Poisson(REQUESTS, REPLICAS, named=False), shares_prefixes=False))
    return time.process_time() - began, done.steps


def main() -> None:
    operations()  # reads the fits of the GPU before the time is measured
    rounds = []
    for _ in range(ROUNDS):
        plain_s, _steps = simulate(TokenCost(6_000_000, 18_000, 450))
        began = time.process_time()
        cost = operations()
        tables_s = time.process_time() - began
        full_s, steps = simulate(cost)
        rounds.append((plain_s, full_s + tables_s, 1e6 * (full_s + tables_s - plain_s) / steps))
    plain_s, full_s, more_us = (median(column) for column in zip(*rounds, strict=True))
    fewer = 1 - median(plain / full for plain, full, _ in rounds)
    print(f"three prices         {plain_s:.2f} s of CPU for {REQUESTS:,} requests")
    print(f"operations           {full_s:.2f} s, tables included: {more_us:.2f} µs a step more (target 5)")
    print(f"requests per second  {100 * fewer:.0f} % fewer (target 30 %)")
    print(json.dumps({"plain_s": plain_s, "full_s": full_s, "more_us_per_step": more_us, "fewer": fewer}))


if __name__ == "__main__":
    main()
