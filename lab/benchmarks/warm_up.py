"""The effect of an empty start: the mean wait of 1,000 requests divided by the steady mean wait.

The ratio is given by the number of earlier arrivals, which are left out of the mean. One server has Poisson arrivals
and equal services (M/D/1), whose steady mean wait is `load / (2 (1 - load))` services (Kleinrock, Queueing Systems I,
1975). `python -m lab.benchmarks.warm_up` simulates it, so every machine prints the same.
"""

from __future__ import annotations

import numpy as np

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.reshape import reshaped

SERVICE_NS = 1_000_000
COUNTED = 1000
RUNS = 400
ONE_SLOT = {"max_num_seqs": 1, "max_num_batched_tokens": 1000, "max_model_len": 1000, "num_blocks": 1000}


def mean_wait(load: float, left_out: int, seed: int) -> float:
    """Return the average wait of the requests that arrive after the first `left_out`, in service times."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(SERVICE_NS / load, left_out + COUNTED)).astype(np.int64).tolist()
    requests = [WorkloadRequest(id, arrival, (("", 1),), 1) for id, arrival in enumerate(arrivals)]
    workload = Workload(requests, shares_prefixes=False)
    if left_out:
        workload = reshaped(workload, warm_up_s=left_out * SERVICE_NS / load / 1e9)
    sink = TableSink()
    deployment = Deployment(scheduler=SchedulerConfig(**ONE_SLOT))
    Cluster(deployment, TokenCost(SERVICE_NS, 0, 0), sink, shares_prefixes=False, steps=False).run(workload)
    waits = sink.requests["scheduled_ns"].to_numpy() - sink.requests["arrival_ns"].to_numpy()
    return float(waits.mean()) / SERVICE_NS


def main() -> None:
    print("| load | arrivals left out | mean wait against the steady one |\n|---|---|---|")
    for load in (0.8, 0.9, 0.95):
        steady = load / (2 * (1 - load))
        for left_out in (0, 200, 1000, 4000):
            ratios = [mean_wait(load, left_out, seed) / steady for seed in range(RUNS)]
            half = 1.96 * np.std(ratios, ddof=1) / np.sqrt(RUNS)
            change = f"{100 * (np.mean(ratios) - 1):+.0f} % (+-{100 * half:.0f})"
            print(f"| {100 * load:.0f} % | {left_out:,} | {change} |", flush=True)


if __name__ == "__main__":
    main()
