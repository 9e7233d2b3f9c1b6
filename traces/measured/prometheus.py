"""A running vLLM, from two scrapes of its `/metrics`: the requests in between, and how long they took.

The scrapes hold sums and histograms, no requests. So the workload is made to have their means: Poisson arrivals at the
rate at which requests ended, prompt and output lengths drawn within their buckets, and as much shared prefix as the
prefix cache found. Of the latencies only means are figures, since percentiles are known no closer than a bucket.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Literal

from pydantic import Field

from serving.errors import UserError
from serving.settings import Settings
from serving.workload import PRIVATE, Workload, WorkloadRequest, prompt_of
from traces.measured.prometheus_text import Histogram, Window
from traces.measured.run import MeasuredRun

_LATENCIES = {
    "ttft_ms.mean": ("vllm:time_to_first_token_seconds",),
    "tpot_ms.mean": ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
    "e2e_ms.mean": ("vllm:e2e_request_latency_seconds",),
}


class Prometheus(Settings):
    """Two snapshots of one engine, `window_s` seconds apart."""

    format: Literal["prometheus"] = "prometheus"
    before: str
    after: str
    window_s: float = Field(gt=0, allow_inf_nan=False)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. TTFT counts from arrival at the API server."""
        window = Window(data / self.before, data / self.after)
        prompts = window.histogram("vllm:request_prompt_tokens")
        outputs = window.histogram("vllm:request_generation_tokens")
        count = round(outputs.count)
        if count < 1:
            remedy = "no request ended between the two snapshots; take them further apart"
            raise UserError("measured.after", self.after, remedy)
        draw = random.Random(self.seed)
        shared = _shared_share(window)
        lengths = zip(_drawn(prompts, count, draw), _drawn(outputs, count, draw), strict=True)
        requests, now_s = [], 0.0
        for id_, (prompt, output) in enumerate(lengths):
            hit = round(prompt * shared)
            parts = prompt_of(("prefix", hit), (PRIVATE, prompt - hit))
            requests.append(WorkloadRequest(id_, round(now_s * 1e9), parts, output))
            now_s += draw.expovariate(count / self.window_s)
        workload = Workload(requests, name=Path(self.after).stem, shares_prefixes=shared > 0)
        figures = {figure: 1e3 * _first(window, names).mean for figure, names in _LATENCIES.items()}
        figures["request_throughput"] = count / self.window_s
        figures["output_throughput"] = window.counter("vllm:generation_tokens_total") / self.window_s
        return [MeasuredRun("window", workload, figures, caution="arrivals and lengths are drawn to match histograms")]


def _first(window: Window, names: tuple[str, ...]) -> Histogram:
    """Return the first of several names, newest first, that the engine exports."""
    return window.histogram(next((name for name in names if window.has(f"{name}_bucket")), names[0]))


def _shared_share(window: Window) -> float:
    """Share of the looked-up prompt tokens that the prefix cache had; 0 where it is off."""
    hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    if not (window.has(hits) and window.has(queries)) or not window.counter(queries):
        return 0.0
    return window.counter(hits) / window.counter(queries)


def _drawn(histogram: Histogram, count: int, draw: random.Random) -> list[int]:
    """`count` lengths, evenly spread in their buckets, then scaled so that their mean is the histogram's.

    The open last bucket is taken to be as wide as all before it.
    """
    values = []
    low = 0.0
    for bound, in_bucket in zip(histogram.bounds, histogram.counts, strict=True):
        high = bound if math.isfinite(bound) else max(2 * low, 1.0)
        values += [draw.uniform(low, high) for _ in range(round(in_bucket))]
        low = bound
    values = (values + [histogram.mean] * count)[:count]
    draw.shuffle(values)
    scale = histogram.mean * len(values) / (sum(values) or 1.0)
    return [max(round(value * scale), 1) for value in values]
