"""CPU time of simulating an engine with pipeline stages, where each step goes through its requests one by one.

python -m lab.benchmarks.pipeline_speed
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

COUNT, RATE_PER_S = 6000, 60.0


class EvenStages(TokenCost):
    """`PipelinedCost` whose stages share a step evenly."""

    def __init__(self, stages: int) -> None:
        super().__init__(3_000_000, 20_000, 10)
        self.stages = stages

    def stages_ns(self, plan: StepPlan) -> list[int]:
        return [self.step_ns(plan) // self.stages] * self.stages

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [0] * (self.stages - 1)


def workload() -> Workload:
    """Return Poisson arrivals, lognormal prompts and exponential outputs."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1e9 / RATE_PER_S, COUNT)).astype(int).tolist()
    prompts = np.clip(rng.lognormal(4.5, 1.0, COUNT), 1, 700).astype(int).tolist()
    outputs = np.clip(rng.exponential(80, COUNT), 1, 300).astype(int).tolist()
    rows = zip(arrivals, prompts, outputs, strict=True)
    return Workload([WorkloadRequest(id, at, (("", n),), out) for id, (at, n, out) in enumerate(rows)])


def main() -> None:
    offered = workload()
    print("| loop | stages | steps | tokens a step | µs a step | requests a second |\n|---|---|---|---|---|---|")
    for overlaps, stages in product((False, True), (1, 2, 4, 8)):
        scheduler = SchedulerConfig(num_blocks=3000, max_num_batched_tokens=256, async_scheduling=overlaps)
        engine = Deployment(pipeline_parallel_size=stages, scheduler=scheduler)
        best_s = float("inf")
        for _ in range(3):
            cluster = Cluster(engine, EvenStages(stages), TableSink(), replicas=2, shares_prefixes=False, steps=False)
            began = time.process_time()
            done = cluster.run(offered)
            best_s = min(best_s, time.process_time() - began)
        tokens = done.output_tokens / done.steps
        loop, a_step_us = "overlapped" if overlaps else "plain", 1e6 * best_s / done.steps
        print(f"| {loop} | {stages} | {done.steps:,} | {tokens:.1f} | {a_step_us:.1f} | {COUNT / best_s:,.0f} |")


if __name__ == "__main__":
    main()
