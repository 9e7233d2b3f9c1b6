"""Five changes to a server, predicted by the simulator and then measured on vLLM itself, with the noise of both.

`python -m lab.benchmarks.vllm_changes OUT [SEEDS] [SECONDS] [CHANGE ...]` needs `make vllm` and `tokentwin model fetch
smollm2`. It calibrates vLLM once, on other traffic. For each change and each of SEEDS (5) seeds, it makes a real run of
each side, in turns (A B, B A, ...), and simulates the same requests. Then it prints the table of lab/results/vllm.md.
Requests of one run arrive within about SECONDS (25). If OUT already has a calibration, it is kept.

The model is SmolLM2 with 2 of its 30 layers, a vocabulary of 4,096 tokens and random weights, so that hundreds of
requests fit into a minute.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

from tokentwin.planning.compare.comparer import compare_on_engine
from tokentwin.planning.compare.document import Compared, ComparisonDocument, Row
from tokentwin.planning.compare.request import CompareRequest, Side
from tokentwin.planning.home import home
from tokentwin.planning.measure.calibrator import fit_recordings, measure
from tokentwin.planning.measure.real_engine import load_engines, pace_of, record_whole
from tokentwin.planning.request import Timing
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

SMALLER = {"num_hidden_layers": 2, "vocab_size": 4096}
CALIBRATION_S = 90.0
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
STATS = ("p50", "p99")
SCHEDULER = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "num_blocks": 150}
_RATE = "rate.txt"
CHANGES: dict[str, dict[str, Any]] = {
    "chunks of 64 tokens": {"max_num_batched_tokens": 64},
    "at most 4 requests": {"max_num_seqs": 4},
    "no prefix caching": {"enable_prefix_caching": False},
    "40 KV blocks": {"num_blocks": 40},
    "policy sjf": {"policy": "sjf"},
}


def traffic(rate: float, seconds: float) -> dict[str, Any]:
    """Return bursty chats that share one of two system prompts, at `rate` requests a second."""
    return {
        "name": "changes",
        "seed": 11,
        "requests": max(round(rate * seconds), 20),
        "arrivals": {"kind": "gamma", "rate": rate, "cv": 1.5},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.7, "max": 300},
        "output": {"kind": "lognormal", "mean": 20, "sigma": 0.7, "max": 80},
        "system_prompts": {"count": 2, "tokens": {"kind": "fixed", "tokens": 96}},
    }


def small_model(folder: Path) -> str:
    """Write a smaller version of SmolLM2's shape to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    smollm2 = home() / "models" / "smollm2"
    copy(smollm2 / "tokenizer.json", folder)
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | SMALLER), encoding="utf-8")
    return str(folder.resolve())


def calibrated(out: Path) -> float:
    """Calibrate vLLM into `out`, unless that is done, and return 70 % of the requests a second that it can serve."""
    if (out / _RATE).exists():
        return float((out / _RATE).read_text(encoding="utf-8"))
    scheduler = {**SCHEDULER, "block_size": 32}
    stated = {"model": small_model(out / "model"), "engine": "vllm", "scheduler": scheduler}
    with closing(load_engines(parse(Deployment, stated, where="benchmark"), partial(print, file=sys.stderr))) as engine:
        pace = pace_of(engine)
        calibrate(engine, out)
    request_ns = 108 * pace.prompt_token_ns + 20 * pace.decode_step_ns / 8
    (out / _RATE).write_text(str(0.7e9 / request_ns), encoding="utf-8")
    return 0.7e9 / request_ns


def calibrate(engine: Any, out: Path) -> None:
    """Measure an engine, and write its calibration to `out`."""
    record = partial(record_whole, overwrite=True)
    made = measure(engine, out, CALIBRATION_S, lambda workload, path: record(workload, engine, path))
    fit_recordings(list(made), out)


def change(compared: Compared | None, metric: str, stat: str) -> str:
    """Return B - A in percent of A, with its 95 % interval, which holds for all rows of the table at once."""
    row = next((r for r in compared.rows if (r.metric, r.stat) == (metric, stat)), None) if compared else None
    if row is None or row.percent is None or not row.a:
        return ""
    return f"{row.percent:+.0f} ({_percent(row, row.low)} to {_percent(row, row.high)})"


def _percent(row: Row, end: float | None) -> str:
    return "?" if end is None or not row.a else f"{100 * end / row.a:+.0f}"


def noise(out: Path) -> dict[tuple[str, str], float]:
    """Return the range of side A's runs with the same seed, in percent of their mean, averaged over the seeds.

    Every change has one such run of each seed.
    """
    seeds: dict[str, list[RunMetrics]] = defaultdict(list)
    for path in sorted(out.glob("*/a/run-*")):
        seeds[path.name].append(RunMetrics.from_recording(Recording.load(path)))
    apart: dict[tuple[str, str], float] = {}
    for metric in METRICS:
        for stat in STATS:
            values = [[run.distribution(metric).as_dict()[stat] for run in runs] for runs in seeds.values()]
            spans = [100 * (max(runs) - min(runs)) / (sum(runs) / len(runs)) for runs in values]
            apart[metric, stat] = sum(spans) / len(spans)
    return apart


def rows(name: str, document: ComparisonDocument) -> list[str]:
    """Return Markdown rows of one change: predicted blind, predicted with the real runs' slowdown, and measured."""
    simulations = (document.simulated, document.same_weather, document)
    return [
        " | ".join([f"| {name}", f"{metric.removesuffix('_ms').upper()} {stat}"]
        + [change(compared, metric, stat) for compared in simulations]) + " |"
        for metric in METRICS
        for stat in STATS
    ]  # fmt: skip


def main(out: Path, seeds: int, seconds: float, names: list[str]) -> None:
    calibration = out / "calibration"
    rate = calibrated(calibration)
    print(f"{rate:.2g} requests a second")
    print("| change | metric | predicted % | with the machine's speed known % | measured % |\n|---|---|---|---|---|")
    for name in names or CHANGES:
        request = CompareRequest(
            a=Side(settings={"policy": "vllm"}),
            b=Side(settings=CHANGES[name]),
            traffic=traffic(rate, seconds),
            seeds=seeds,
            timing=Timing(calibration=str(calibration)),
        )
        runs = out / name.replace(" ", "-")
        say = partial(print, file=sys.stderr, flush=True)
        document = compare_on_engine(request, runs, overwrite=True, say=say)
        (runs / "comparison.json").write_text(document.dumps(indent=1) + "\n", encoding="utf-8")
        print("\n".join(rows(name, document)), flush=True)
    print("Runs of A with the same seed are apart by, in percent:", end=" ")
    print(", ".join(f"{metric} {stat} {percent:.0f}" for (metric, stat), percent in noise(out).items()))


if __name__ == "__main__":
    options = sys.argv[2:]
    main(Path(sys.argv[1]), int(options[0]) if options else 5, float(options[1]) if options[1:] else 25.0, options[2:])
