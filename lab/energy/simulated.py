"""Power and energy per token of published runs, as the simulator predicts them.

`limits.csv` has runs of vLLM on an RTX PRO 6000 under power limits, with weights in int4 and answers of 200 tokens
(github.com/Light-Heart-Labs/MMBT-Messy-Model-Bench-Tests at f4d2a4ea, hardware-tests/vllm-power-sweep-2026-04-29).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.energy.published import PublishedRun
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.resolution import resolved_fleet
from tokentwin.serving.deployments.config import Deployment
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.synth import parse_spec, synthesise

_WAVES, _FEWEST = 3, 60  # requests are at least this multiple of those in flight, and this number
_FULL = 0.9  # share of the largest batch that a step must have to count as steady
_SPREAD = 0.7  # sigma of the lognormal lengths of outputs
_PROMPT = 400  # tokens; an assumed length of the "fixed long technical prompt" of `limits.csv`
_LIMITED_GPU, _ANSWER = "RTX-PRO-6000", 200


class Predicted(NamedTuple):
    """The power of all GPUs in watts, and output tokens per second, in steady state."""

    power_w: float
    tokens_per_s: float

    @property
    def joules_per_token(self) -> float:
        return self.power_w / self.tokens_per_s


@dataclass(frozen=True)
class LimitedRun:
    """A measured run under a power limit."""

    model: str
    concurrency: int
    limit_w: float
    tokens_per_s: float
    power_w: float


def limited_runs() -> list[LimitedRun]:
    """Return the runs of `limits.csv`."""
    with Path(__file__).with_name("limits.csv").open(encoding="utf-8") as file:
        return [
            LimitedRun(
                row["model"],
                int(row["concurrency"]),
                float(row["limit_w"]),
                float(row["tokens_per_s"]),
                float(row["power_w"]),
            )
            for row in csv.DictReader(file)
        ]


def predict(run: PublishedRun) -> Predicted:
    """Simulate a run of `runs.csv` with as many requests in flight as its mean batch."""
    output = {"kind": "lognormal", "mean": run.output, "sigma": _SPREAD, "max": round(8 * run.output)}
    return _steady(run.deployment, run.gpu, round(run.batch), run.prompt, output)


def predict_limited(run: LimitedRun) -> Predicted:
    """Simulate a run of `limits.csv`."""
    deployment = Deployment(model=run.model, device="cuda", quantization="int4", power_limit_w=run.limit_w)
    return _steady(deployment, _LIMITED_GPU, run.concurrency, _PROMPT, {"kind": "fixed", "tokens": _ANSWER})


def _steady(deployment: Deployment, gpu: str, in_flight: int, prompt: int, output: dict[str, object]) -> Predicted:
    requests = max(_WAVES * in_flight, _FEWEST)
    arrivals = {"kind": "closed", "concurrency": in_flight}
    lengths = {"prompt": {"kind": "fixed", "tokens": prompt}, "output": output}
    workload = synthesise(parse_spec({"requests": requests, "arrivals": arrivals, **lengths}))
    longest = max(request.prompt_len + request.output_len for request in workload.requests)
    deployment = deployment.rescheduled(max_model_len=-(-longest // 1024) * 1024, max_num_seqs=max(in_flight, 1))
    whole, _ = resolved_fleet(deployment, None, gpu)
    scenario = price_scenario(workload, None, gpu, whole)
    work, sink = scenario.work, TableSink()
    assert work is not None and work.power is not None
    scenario.cluster(Cluster, sink, leaps=True).run(workload)
    steps = sink.steps
    start, end, rows = (steps.column(name).to_numpy() for name in ("start_ns", "end_ns", "decode_rows"))
    joules = work.joules_beyond_idle(steps, (end - start) / 1e9)
    assert joules is not None
    full = np.flatnonzero(rows >= _FULL * rows.max())
    first, last = full[0], full[-1] + 1
    seconds = float(end[last - 1] - start[first]) / 1e9
    tokens = float(steps.column("sampled_rows").to_numpy()[first:last].sum())
    watts = float(joules[first:last].sum()) / seconds + work.gpus * work.power.idle_w
    return Predicted(watts, tokens / seconds)
