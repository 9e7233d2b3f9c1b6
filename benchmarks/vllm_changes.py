"""Five changes to a server, predicted by the simulator and then measured on vLLM itself, with the noise of both.

`python benchmarks/vllm_changes.py OUT [SECONDS] [CHANGE ...]` needs `make vllm`. It calibrates vLLM once; for each
change it makes two real runs of each side in turns (A B, B A), simulates the same requests, and prints a table.
SECONDS is about how long the requests of one run take to arrive (60).
"""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from planning.compare.comparer import compare_on_engine
from planning.compare.document import Compared, ComparisonDocument
from planning.compare.request import CompareRequest, Side
from planning.measure.calibrator import fit_recordings, measure
from planning.measure.real_engine import load_engines, pace_of, record_whole
from planning.request import Timing
from serving.deployments.config import Deployment, parse
from traces.recording import Recording
from traces.run_metrics import RunMetrics

REPEATS = 2
CALIBRATION_S = 60.0
METRICS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("e2e_ms", "p50"), ("e2e_ms", "p99"))
SCHEDULER = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "num_blocks": 150}
CHANGES: dict[str, dict[str, Any]] = {
    "chunks of 64 tokens": {"max_num_batched_tokens": 64},
    "at most 4 requests": {"max_num_seqs": 4},
    "no prefix caching": {"enable_prefix_caching": False},
    "24 KV blocks": {"num_blocks": 24},
    "policy sjf": {"policy": "sjf"},
}


def traffic(rate: float, seconds: float) -> dict[str, Any]:
    """Bursty chats of two system prompts; `rate` requests a second."""
    return {
        "name": "changes",
        "seed": 11,
        "requests": max(round(rate * seconds), 20),
        "arrivals": {"kind": "gamma", "rate": rate, "cv": 1.5},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.7, "max": 300},
        "output": {"kind": "lognormal", "mean": 20, "sigma": 0.7, "max": 80},
        "system_prompts": {"count": 2, "tokens": {"kind": "fixed", "tokens": 96}},
    }


def calibrated(out: Path) -> float:
    """Calibrate vLLM into `out`, and return 70 % of the requests a second that it can serve."""
    scheduler = {**SCHEDULER, "block_size": 32}
    deployment = parse(Deployment, {"model": "smollm2", "engine": "vllm", "scheduler": scheduler}, where="benchmark")
    with closing(load_engines(deployment, partial(print, file=sys.stderr))) as engine:
        pace = pace_of(engine)
        record = partial(record_whole, overwrite=True)
        made = measure(engine, out, CALIBRATION_S, lambda workload, path: record(workload, engine, path))
        fit_recordings(list(made), out)
    request_ns = 108 * pace.prompt_token_ns + 20 * pace.decode_step_ns / 8
    return 0.7e9 / request_ns


def shown(percent: float | None) -> str:
    return "" if percent is None else f"{percent:+.0f}"


def percents(compared: Compared | None) -> dict[tuple[str, str], float | None]:
    """B - A in percent of A, by metric and statistic."""
    return {} if compared is None else {(row.metric, row.stat): row.percent for row in compared.rows}


def floors(out: Path) -> dict[tuple[str, str], float]:
    """How far the real runs of a side are apart, in percent of the smaller, the larger of both sides."""
    floor: dict[tuple[str, str], float] = {}
    for side in "ab":
        runs = [RunMetrics.of(Recording.load(path)) for path in sorted((out / side).glob("run-*"))]
        for metric, stat in METRICS:
            values = [float(run.distribution(metric).as_dict()[stat]) for run in runs]
            apart = 100 * (max(values) / min(values) - 1)
            floor[metric, stat] = max(floor.get((metric, stat), 0.0), apart)
    return floor


def rows(name: str, document: ComparisonDocument, out: Path) -> list[str]:
    """Markdown rows of one change: predicted blind, in the weather of the real runs, measured, and the noise."""
    blind, same, real = percents(document.simulated), percents(document.same_weather), percents(document)
    noise = floors(out)
    return [
        f"| {name} | {metric.removesuffix('_ms').upper()} {stat} | {shown(blind.get((metric, stat)))} | "
        f"{shown(same.get((metric, stat)))} | {shown(real.get((metric, stat)))} | {noise[metric, stat]:.0f} |"
        for metric, stat in METRICS
    ]


def main(out: Path, seconds: float, names: list[str]) -> None:
    calibration = out / "calibration"
    rate = calibrated(calibration)
    print(f"{rate:.2g} requests a second")
    print("| change | metric | predicted % | in the same weather % | measured % | noise % |\n|---|---|---|---|---|---|")
    for name in names or CHANGES:
        request = CompareRequest(
            a=Side(settings={"policy": "vllm"}),
            b=Side(settings=CHANGES[name]),
            traffic=traffic(rate, seconds),
            timing=Timing(calibration=str(calibration)),
        )
        runs = out / name.replace(" ", "-")
        say = partial(print, file=sys.stderr)
        document = compare_on_engine(request, runs, repeats=REPEATS, overwrite=True, say=say)
        (runs / "comparison.json").write_text(document.dumps(indent=1) + "\n", encoding="utf-8")
        print("\n".join(rows(name, document, runs)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 60.0, sys.argv[3:])
