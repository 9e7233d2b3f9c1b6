"""A measured run of vLLM from two scrapes of its `/metrics`: the requests between them, and their latencies.

The scrapes have sums and histograms, but no requests. The workload is therefore made to have the same means: Poisson
arrivals at the rate at which requests ended, prompt and output lengths drawn within their buckets, and a shared prefix
that gives the measured hit rate of the prefix cache. Counters and histograms only grow, so the difference of two
scrapes counts only what happened between them. Only the means of latencies are figures, because a histogram gives
percentiles only to the width of a bucket. The text format is Prometheus's:
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from serving.errors import UserError
from serving.settings import Settings
from serving.workload import PRIVATE, Workload, WorkloadRequest, prompt_of
from traces.formats.rows import read_head
from traces.measured.run import MeasuredRun

_LATENCIES = {
    "ttft_ms.mean": ("vllm:time_to_first_token_seconds",),
    "tpot_ms.mean": ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
    "e2e_ms.mean": ("vllm:e2e_request_latency_seconds",),
}
_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?\d+)?')
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:\\.|[^"\\])*)"')
_LARGEST = 1 << 28

Samples = Mapping[str, Mapping[float | None, float]]  # name -> upper bound of the bucket, or None -> value


@dataclass(frozen=True)
class Histogram:
    """A histogram: `bounds` are the buckets' upper ends (the last is infinite), `counts` are not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean, which is exact because the sum is stored in addition to the buckets."""
        return self.total / self.count


class Window:
    """The differences between two snapshots of one engine; samples with different labels are added up."""

    def __init__(self, before: Path, after: Path) -> None:
        self._after_path = after
        self._before, self._after = read_samples(before), read_samples(after)

    def counter(self, name: str) -> float:
        """Return the growth of a counter. Raises UserError if it is missing or decreased."""
        return self._growth(name, None)

    def has(self, name: str) -> bool:
        return name in self._after

    def histogram(self, name: str) -> Histogram:
        """Return a histogram of the values between the snapshots."""
        bucket = f"{name}_bucket"
        bounds = sorted(bound for bound in self._after.get(bucket, {}) if bound is not None)
        if not bounds or not math.isinf(bounds[-1]):
            raise UserError(str(self._after_path), name, "must be a histogram with a bucket le=+Inf")
        cumulative = [self._growth(bucket, bound) for bound in bounds]
        counts = tuple(now - before for now, before in zip(cumulative, [0.0, *cumulative], strict=False))
        if min(counts) < 0:
            raise UserError(str(self._after_path), name, "has buckets that do not add up")
        return Histogram(tuple(bounds), counts, self._growth(f"{name}_sum", None))

    def _growth(self, name: str, bound: float | None) -> float:
        after = self._after.get(name, {}).get(bound)
        if after is None:
            raise UserError(str(self._after_path), name, "is missing in this snapshot")
        grown = after - self._before.get(name, {}).get(bound, 0.0)
        if grown < 0:
            remedy = "decreased between the snapshots: are the files swapped, or was the server restarted?"
            raise UserError(str(self._after_path), name, remedy)
        return grown


def read_samples(path: Path) -> Samples:
    """Return a snapshot's samples, summed over all labels except `le`. Raises UserError with an invalid line."""
    samples: dict[str, dict[float | None, float]] = {}
    try:
        lines = read_head(path, _LARGEST).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError("measured", str(path), "is not UTF-8 text") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line)
        if not sample:
            raise UserError(f"{path}:{number}", line, "is not a Prometheus sample")
        name, labels, text = sample.groups()
        value = _number(path, number, text)
        le = dict(_LABEL.findall(labels or "")).get("le")
        bound = None if le is None else _number(path, number, le)
        of_name = samples.setdefault(name, {})
        of_name[bound] = of_name.get(bound, 0.0) + value
    return samples


def labels_of(name: str, text: str) -> dict[str, str]:
    """Return the labels of the first sample of `name` in a scrape; empty if there is none."""
    return next(iter(labels_of_all(name, text)), {})


def labels_of_all(name: str, text: str) -> list[dict[str, str]]:
    """Return the labels of all samples of `name` in a scrape."""
    return [dict(_LABEL.findall(sample[2] or "")) for sample in _samples_of(name, text)]


def total_of(name: str, text: str) -> float | None:
    """Return the sum of all samples of `name` in a scrape, over all labels; None if there is none."""
    try:
        values = [float(sample[3]) for sample in _samples_of(name, text)]
    except ValueError:
        return None
    return sum(values) if values else None


def _samples_of(name: str, text: str) -> Iterator[re.Match[str]]:
    for line in text.splitlines():
        if (sample := _SAMPLE.fullmatch(line.strip())) and sample[1] == name:
            yield sample


def _number(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{path}:{line}", text, "is not a number") from None


class Prometheus(Settings):
    """Two snapshots of one engine that were taken `window_s` seconds apart."""

    format: Literal["prometheus"] = "prometheus"
    before: str
    after: str
    window_s: float = Field(gt=0, allow_inf_nan=False)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. TTFT is from the arrival at the API server."""
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
    """Return the first histogram of `names` (newest name first) that the engine exports."""
    return window.histogram(next((name for name in names if window.has(f"{name}_bucket")), names[0]))


def _shared_share(window: Window) -> float:
    """Return the hit rate of the prefix cache in tokens; 0 if the cache is off."""
    hits, queries = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    if not (window.has(hits) and window.has(queries)) or not window.counter(queries):
        return 0.0
    return window.counter(hits) / window.counter(queries)


def _drawn(histogram: Histogram, count: int, draw: random.Random) -> list[int]:
    """Draw `count` lengths uniformly within their buckets, and scale them to the mean of the histogram.

    The infinite last bucket is assumed to be as wide as all buckets before it together.
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
