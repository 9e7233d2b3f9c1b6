"""The benefit and the cost of each scheduling policy, on one overloaded replica.

    python -m lab.benchmarks.policies

Three tenants send two minutes of traffic; one of them sends several times as much as each of the others. The TTFT limit
is one second for chat requests, and twenty for batch requests. Every policy gets the same arrivals, and the step times
of the oracle recordings (recordings of vLLM's scheduler). The command prints a Markdown table, which is the same on
every machine, because all times are simulated.
"""

from __future__ import annotations

import numpy as np

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics

SECONDS = 120
RATES = {"big": 28.0, "left": 5.0, "right": 5.0}  # requests/s
BOUNDS_MS = {"chat": 1000.0, "batch": 20_000.0}
POLICIES: dict[str, dict[str, object]] = {
    "vllm": {},
    "sarathi": {"sarathi_token_budget": 256},
    "sjf": {},
    "sjf, error 1": {"sjf_error": 1.0},
    "priority-ageing": {"ageing_s": 10.0},
    "edf": {"edf_ttft_ms": BOUNDS_MS},
    "fair": {},
}
COLUMNS = ("TTFT mean s", "TTFT p99 s", "TPOT p99 ms", "chat in time", "batch in time", "small tenants: TTFT s", "Jain")


def traffic(seed: int = 0) -> Workload:
    """Return Poisson arrivals; a fifth are batch requests, with priority 1 and long outputs."""
    rng = np.random.default_rng(seed)
    drawn = []
    for tenant, rate in RATES.items():
        for at in rng.uniform(0, SECONDS, rng.poisson(rate * SECONDS)):
            batch = rng.random() < 0.2
            prompt = int(np.clip(rng.lognormal(6.0, 1.0), 1, 6000))
            output = int(np.clip(rng.exponential(500 if batch else 120), 1, 2000))
            drawn.append((int(at * 1e9), tenant, batch, prompt, output))
    return Workload(
        [
            WorkloadRequest(id, at, ((PRIVATE, prompt),), output, int(batch), tenant, "batch" if batch else "chat")
            for id, (at, tenant, batch, prompt, output) in enumerate(sorted(drawn))
        ],
        shares_prefixes=False,
    )


def measure(label: str) -> list[str]:
    """Return the row of one policy."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_blocks": 6000}
    config = SchedulerConfig.model_validate({**limits, **POLICIES[label]})
    sink = TableSink()
    deployment = Deployment(policy=label.partition(",")[0], scheduler=config)
    Cluster(deployment, TokenCost(6_000_000, 20_000, 400), sink, shares_prefixes=False, steps=False).run(traffic())
    metrics = RunMetrics(sink.requests)
    ttft_ms = metrics.values("ttft_ms")
    classes = np.asarray(sink.requests["slo_class"].to_pylist())
    small = np.asarray(sink.requests["tenant"].to_pylist()) != "big"
    in_time = [float(np.mean(ttft_ms[classes == name] <= bound)) for name, bound in BOUNDS_MS.items()]
    ttft, tpot = metrics.distribution("ttft_ms"), metrics.distribution("tpot_ms")
    return [
        f"{ttft.mean / 1e3:.1f}",
        f"{ttft.p99 / 1e3:.1f}",
        f"{tpot.p99:.0f}",
        *(f"{share:.0%}" for share in in_time),
        f"{ttft_ms[small].mean() / 1e3:.1f}",
        f"{metrics.scalars()['jain_fairness']:.2f}",
    ]


def main() -> None:
    for row in (["policy", *COLUMNS], ["---"] * (len(COLUMNS) + 1), *([f"`{p}`", *measure(p)] for p in POLICIES)):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
