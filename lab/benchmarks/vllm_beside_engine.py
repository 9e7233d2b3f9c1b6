"""Our engine and vLLM on the same CPU: their speeds, and the errors of each calibration on the other engine's runs.

`python -m lab.benchmarks.vllm_beside_engine OUT [SECONDS]` needs `make vllm` and `tokentwin model fetch smollm2`. Both
engines run SmolLM2 with the same settings, one thread and the same requests. Each engine is calibrated. Then the
engines run alternately, REPEATS times: with all requests at once, for the speed, and with requests as they arrive, for
the latencies. A run takes about SECONDS (40).
"""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.compute as pc

from lab.benchmarks import vllm_changes
from lab.benchmarks.vllm_changes import METRICS
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.validation.decision_replay import recorded_deployment, replay_decisions
from tokentwin.planning.measure.real_engine import load_engines, pace_of, record_whole
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.realengine.offered_workload import at_once
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.workload import Workload
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

REPEATS = 2
ENGINES: dict[str, dict[str, Any]] = {"vLLM": {"engine": "vllm"}, "ours": {}}
SCHEDULER = {**vllm_changes.SCHEDULER, "block_size": 32, "async_scheduling": False}

say = partial(print, file=sys.stderr, flush=True)


def traffic(rate: float, seconds: float) -> Workload:
    """Return the chats of `vllm_changes`, at `rate` requests a second and without bursts."""
    even = {"name": "beside", "seed": 5, "arrivals": {"kind": "poisson", "rate": rate}}
    return synthesise(parse_spec(vllm_changes.traffic(rate, seconds) | even, where="benchmark"))


def measured(out: Path, seconds: float) -> None:
    """Calibrate both engines and run them in turns; recordings go to `out`."""
    rate = 0.0
    for number in range(REPEATS):
        for name, own in ENGINES.items():
            stated = {"model": "smollm2", "scheduler": SCHEDULER, **own}
            with closing(load_engines(parse(Deployment, stated, where="benchmark"), say)) as engine:
                if number == 0:
                    vllm_changes.calibrate(engine, out / name / "calibration")
                if not rate:  # vLLM runs first and sets the requests per second, so that both engines get the same rate
                    pace = pace_of(engine)
                    rate = 0.6e9 / (108 * pace.prompt_token_ns + 20 * pace.decode_step_ns / 8)
                    print(f"{rate:.2g} requests a second")
                offered = traffic(rate, seconds)
                record_whole(at_once(offered), engine, out / name / f"at-once-{number}", overwrite=True)
                record_whole(offered, engine, out / name / f"arriving-{number}", overwrite=True)


def speeds(out: Path) -> list[str]:
    """Return Markdown rows: each run's output tokens a second, and the computing thread's CPU time per token."""
    lines = []
    for name in ENGINES:
        runs = [Recording.load(path) for path in sorted((out / name).glob("at-once-*"))]
        tokens = [pc.sum(run.requests["output_tokens"]).as_py() for run in runs]
        per_s = [1e9 * count / run.run["duration_ns"] for count, run in zip(tokens, runs, strict=True)]
        cpu_ms = [pc.sum(run.steps["thread_ns"]).as_py() / 1e6 / count for count, run in zip(tokens, runs, strict=True)]
        steps = sum(run.steps.num_rows for run in runs)
        alike = sum(replay_decisions(run).identical for run in runs)
        cells = [", ".join(f"{value:.1f}" for value in values) for values in (per_s, cpu_ms)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {alike} of {steps} |")
    return lines


def errors(out: Path) -> list[str]:
    """Return Markdown rows: errors of each calibration on each engine's latencies, and the range of the latencies."""
    lines = []
    for real in ENGINES:
        runs = [Recording.load(path) for path in sorted((out / real).glob("arriving-*"))]
        seen = [RunMetrics.from_recording(run) for run in runs]
        for by in ENGINES:
            cost = StepCost(Calibration.load(out / by / "calibration"))
            predicted = RunMetrics(PricedScenario(runs[0].workload(), recorded_deployment(runs[0]), cost).requests())
            cells = []
            for metric in METRICS:
                for stat in ("p50", "mean"):
                    values = [run.distribution(metric).as_dict()[stat] for run in seen]
                    off = 100 * (predicted.distribution(metric).as_dict()[stat] / mean(values) - 1)
                    apart = 100 * (max(values) - min(values)) / mean(values)
                    cells.append(f"{off:+.1f} ({apart:.1f})")
            lines.append(f"| {real} | {by} | " + " | ".join(cells) + " |")
    return lines


def main(out: Path, seconds: float) -> None:
    measured(out, seconds)
    print("| engine | output tokens/s, each run | CPU ms per output token | steps decided alike |\n|---|---|---|---|")
    print("\n".join(speeds(out)))
    names = [f"{metric.removesuffix('_ms').upper()} {stat}" for metric in METRICS for stat in ("p50", "mean")]
    print("\n| real run of | calibration of | " + " | ".join(f"{name}, % off (noise)" for name in names) + " |")
    print("|---" * (2 + len(names)) + "|")
    print("\n".join(errors(out)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 40.0)
