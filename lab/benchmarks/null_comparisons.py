"""The rate at which `tokentwin compare` claims a difference where there is none; it promises at most one in twenty.

Two sides serve the same requests with the same cost model. They differ only in the seed of slowly changing step times
(a machine's noise), or in the seed of the errors of shortest-job-first's predictions. `python -m
lab.benchmarks.null_comparisons [RUNS]` makes RUNS (default 200) comparisons of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from scipy.signal import lfilter

from tokentwin.planning.compare.comparison import compare
from tokentwin.planning.compare.document import RanDeployment, Side
from tokentwin.planning.compare.paired_runs import PairedRuns
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

MS, S = 1_000_000, 1_000_000_000
RUNS = int(sys.argv[1]) if sys.argv[1:] else 200
SETTINGS = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1024}
SIDE = Side(deployment=RanDeployment(policy="vllm", scheduler={}))


class NoisyCost(TokenCost):
    """Step times multiplied by a factor, usually 0.4 to 2.5, that changes over about twenty steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(6 * MS, 18_000, 450)
        noise = np.random.default_rng(seed).standard_normal(200_000) * np.sqrt(1 - 0.95**2)
        self._factors = np.exp(0.3 * lfilter([1.0], [1.0, -0.95], noise)).tolist()

    def step_ns(self, plan: StepPlan) -> int:
        return round(super().step_ns(plan) * self._factors[plan.seq])

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> list[int]:
        raise AssertionError("every step is kept, and none leapt over")


def workload(seed: int, count: int, rate: float) -> Workload:
    """Return Poisson arrivals, lognormal prompts and exponential outputs."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(S / rate, count)).astype(int).tolist()
    prompts = np.clip(rng.lognormal(4.5, 1.0, count), 1, 700).astype(int).tolist()
    outputs = np.clip(rng.exponential(50, count), 1, 300).astype(int).tolist()
    sizes = zip(arrivals, prompts, outputs, strict=True)
    return Workload([WorkloadRequest(i, t, (("", p),), o) for i, (t, p, o) in enumerate(sizes)], shares_prefixes=False)


def noisy(case: int, seed: int, count: int, rate: float) -> pa.Table:
    deployment = Deployment(scheduler=SchedulerConfig(**SETTINGS, async_scheduling=True))
    sink = TableSink()
    Cluster(deployment, NoisyCost(seed), sink, shares_prefixes=False, steps=True).run(workload(case, count, rate))
    return sink.requests


def guessed(case: int, seed: int, count: int, rate: float) -> pa.Table:
    scheduler = SchedulerConfig(**SETTINGS, sjf_error=1.0, sjf_seed=seed)
    cost = TokenCost(6 * MS, 18_000, 450)
    return PricedScenario(workload(case, count, rate), Deployment(policy="sjf", scheduler=scheduler), cost).requests()


def claimed(serve: Callable[..., pa.Table], count: int, rate: float, seeds: int = 1) -> float:
    """Return the share of comparisons that claim a difference."""
    claims = 0
    for run in range(RUNS):
        cases = range(seeds * run, seeds * (run + 1))
        a, b = ([serve(case, 2 * case + side, count, rate) for case in cases] for side in (0, 1))
        claims += compare(PairedRuns(a, b), SIDE, SIDE).difference
    return claims / RUNS


def main() -> None:
    print(f"| {RUNS} comparisons each | a difference is claimed |\n|---|---|")
    for what, share in (
        ("400 requests, lightly loaded, noisy steps", lambda: claimed(noisy, 400, 10)),
        ("1,000 requests, lightly loaded, noisy steps", lambda: claimed(noisy, 1000, 10)),
        ("400 requests, close to saturation, noisy steps", lambda: claimed(noisy, 400, 40)),
        ("1,000 requests, close to saturation, noisy steps", lambda: claimed(noisy, 1000, 40)),
        ("400 requests, overloaded, noisy steps", lambda: claimed(noisy, 400, 60)),
        ("1,000 requests, overloaded, noisy steps", lambda: claimed(noisy, 1000, 60)),
        ("6 seeds of 150 requests, noisy steps", lambda: claimed(noisy, 150, 20, seeds=6)),
        ("400 requests, `sjf`", lambda: claimed(guessed, 400, 40)),
    ):
        print(f"| {what} | {100 * share():.1f} % |", flush=True)


if __name__ == "__main__":
    main()
