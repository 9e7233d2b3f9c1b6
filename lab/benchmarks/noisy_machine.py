"""The remaining error of the simulator on a noisy machine, if it knows how much the machine was slowed down.

On every core a neighbour process computes for random times and rests for random times. On the same machine an engine is
calibrated, and then records the same trace repeatedly. Each recording is simulated blind, and with the slowdown of the
machine in that run. `python -m lab.benchmarks.noisy_machine [--runs 20] [--minutes 12] [--quiet]`; `--quiet` leaves the
neighbours out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np

from tokentwin.calibration.validation.covalidation import covalidate
from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.planning.measure.calibrator import fit_recordings, measure
from tokentwin.planning.measure.demo_size import demo_size
from tokentwin.planning.measure.real_engine import load_engine, pace_of, record_whole
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.traces.synth import parse_spec, synthesise

SCHEDULER = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "num_blocks": 300}
ON_S, OFF_S = (0.05, 2.0), (0.2, 4.0)  # seconds of computing and of resting, drawn uniformly between these
STATISTICS = [(metric, stat) for metric in ("ttft_ms", "tpot_ms", "e2e_ms") for stat in ("mean", "p50")]


def neighbour(seed: int) -> None:
    """Compute and rest in turns, until killed."""
    rng = np.random.default_rng(seed)
    matrix = rng.random((512, 512))
    while True:
        until = time.monotonic() + rng.uniform(*ON_S)
        while time.monotonic() < until:
            matrix @ matrix
        time.sleep(rng.uniform(*OFF_S))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the processes that start now read this variable
    made = [get_context("spawn").Process(target=neighbour, args=(seed,), daemon=True) for seed in range(count)]
    for process in made:
        process.start()
    try:
        yield
    finally:
        for process in made:
            process.kill()


def validated(folder: Path, runs: int, minutes: float) -> Iterator[ValidationReport]:
    deployment = parse(Deployment, {"model": "random:smollm2", "scheduler": SCHEDULER}, where="benchmark")
    engine = load_engine(deployment, lambda line: print(line, file=sys.stderr))
    size = demo_size(pace_of(engine), SCHEDULER["max_num_seqs"] // 2, 60 * minutes, runs)
    workload = synthesise(parse_spec(size.trace(), where="benchmark"))
    calibrated, real = [], []
    paths = measure(engine, folder, size.calibration_s, lambda work, out: record_whole(work, engine, out, True))
    for number in range(max(runs, 5)):  # runs take turns, as in the demo
        calibrated += [path for path in [next(paths, None)] if path is not None]
        if number < runs:
            real.append(folder / f"real-{number}")
            record_whole(workload, engine, real[-1], overwrite=True)
            print(f"real run {number + 1} of {runs}", file=sys.stderr)
    calibration = fit_recordings(calibrated, folder)
    for path in real:
        yield covalidate([path], calibration, folder / f"report-{path.name}", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, neighbours(0 if options.quiet else os.cpu_count() or 1):
        reports = list(validated(Path(folder), options.runs, options.minutes))
    steps = [report.rungs.step for report in reports if report.rungs.step is not None]
    for name in ("prefill", "decode", "mixed"):
        blind_pct, same_pct = (
            median(step[name].median_error_pct or 0.0 for step in errors if name in step)
            for errors in ([step.regimes for step in steps], [step.same_weather for step in steps])
        )
        print(
            f"{name:8} step, median error: blind {blind_pct:5.1f} %, with the machine's speed known {same_pct:5.1f} %"
        )
    print("over the runs, median and largest absolute error in %, and share of the real numbers in their 90 % band")
    print("metric   stat   blind: median  worst  band   speed known: median  worst  band")
    for metric, stat in STATISTICS:
        rows = [next(r for r in report.rows if (r.metric, r.stat) == (metric, stat)) for report in reports]
        blind = [abs(row.error_pct or 0.0) for row in rows]
        same = [abs(row.weather_error_pct or 0.0) for row in rows]
        covered = np.mean([bool(row.covered) for row in rows])
        inside = np.mean([(row.weather_low or 0) <= (row.real or 0) <= (row.weather_high or 0) for row in rows])
        print(
            f"{metric:8} {stat:5} {median(blind):15.1f} {max(blind):6.1f} {100 * covered:4.0f} % "
            f"{median(same):21.1f} {max(same):6.1f} {100 * inside:4.0f} %"
        )
    print(reports[0].disturbance)


if __name__ == "__main__":
    main()
