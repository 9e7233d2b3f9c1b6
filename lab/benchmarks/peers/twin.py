"""Our own side of `peers`: one process that simulates a trace with the peers' limits, and records it.

    python -m lab.benchmarks.peers.twin trace.parquet limits.json summary OUT REPLICAS

`summary` records requests, `tokens` also records the time of each token, and `steps` also records every step. It prints
JSON: its results, and the CPU seconds of simulating and recording, without imports, reading the trace and pricing
tables.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.formats.trace_file import read_workload

RECORDS = {"summary": (False, False), "tokens": (False, True), "steps": (True, True)}  # steps, tokens


def main() -> None:
    trace, limits, records, out, replicas = sys.argv[1:]
    scheduler = SchedulerConfig.model_validate_json(Path(limits).read_text())
    deployment = Deployment(model="Llama-3.1-8B", device="cuda", scheduler=scheduler)
    cost = predicted_cost("H100", deployment)
    workload = read_workload(trace)
    steps, tokens = RECORDS[records]
    began = time.process_time()
    done = simulate_to(out, workload, deployment, cost, replicas=int(replicas), steps=steps, tokens=tokens, leaps=True)
    result = {
        "simulation_cpu_s": time.process_time() - began,
        "simulated_s": done.duration_ns / 1e9,
        "finished": done.finished,
        "steps": done.steps,
        "output_tokens": done.output_tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
