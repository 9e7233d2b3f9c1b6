"""How much timing slows the engine down: wall time of steady decode steps with and without timing, in turns.

`python -m lab.benchmarks.step_log_cost` prints both and their ratio for SmolLM2's shape on the CPU. On an idle machine
the ratio should not be distinguishable from 1.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

from lab.gpu_suite.engine_benchmark import timing_cost
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig

if __name__ == "__main__":
    for overlapped in (False, True):
        scheduler = SchedulerConfig(max_num_seqs=8, max_model_len=512, async_scheduling=overlapped)
        deployment = Deployment(model="random:smollm2", scheduler=scheduler)
        engine = Engine(deployment, load_model_files("random:smollm2", Path()))
        engine.warm_up()
        cost = timing_cost(engine, rows=8, context=128, steps=40)
        print(
            f"{'overlapped' if overlapped else 'plain'}: {cost['timed_ns'] / 1e6:.2f} ms a step timed, "
            f"{cost['untimed_ns'] / 1e6:.2f} ms not, {100 * cost['cost_share']:+.1f} %"
        )
        engine.close()
