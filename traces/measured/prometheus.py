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

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest, prompt_of
from tokentwin.traces.formats.rows import read_head
from tokentwin.traces.measured.run import MeasuredRun

_LATENCIES = {
    "ttft_ms.mean": ("vllm:time_to_first_token_seconds",),
    "tpot_ms.mean": ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
    "e2e_ms.mean": ("vllm:e2e_request_latency_seconds",),
}
_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?\d+)?')
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:\\.|[^"\\])*)"')
_LARGEST = 1 << 28
OUTPUT_TOKENS = "vllm:request_generation_tokens"  # a histogram of the requests that ended

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
    """The differences between two snapshots of one engine; samples with different labels are added up.

    Errors name the later snapshot `name`.
    """

    def __init__(self, before: Samples, after: Samples, name: str) -> None:
        self._before, self._after, self._name = before, after, name

    @classmethod
    def between(cls, before: Path, after: Path) -> Window:
        """Return the window between the snapshots in two files. Raises UserError with an invalid line."""
        return cls(read_samples(before), read_samples(after), str(after))

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
            raise UserError(self._name, name, "must be a histogram with a bucket le=+Inf")
        cumulative = [self._growth(bucket, bound) for bound in bounds]
        counts = tuple(now - before for now, before in zip(cumulative, [0.0, *cumulative], strict=False))
        if min(counts) < 0:
            raise UserError(self._name, name, "has buckets that do not add up")
        return Histogram(tuple(bounds), counts, self._growth(f"{name}_sum", None))

    def _growth(self, name: str, bound: float | None) -> float:
        after = self._after.get(name, {}).get(bound)
        if after is None:
            raise UserError(self._name, name, "is missing in this snapshot")
        grown = after - self._before.get(name, {}).get(bound, 0.0)
        if grown < 0:
            remedy = "decreased between the snapshots: are the files swapped, or was the server restarted?"
            raise UserError(self._name, name, remedy)
        return grown


def read_samples(path: Path) -> Samples:
    """Return the samples of the snapshot in a file; see `samples_of`."""
    try:
        return samples_of(read_head(path, _LARGEST).decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise UserError("measured", str(path), "is not UTF-8 text") from None


def samples_of(text: str, name: str) -> Samples:
    """Return a snapshot's samples, summed over all labels except `le`.

    Raises UserError with an invalid line, which calls the snapshot `name`.
    """
    samples: dict[str, dict[float | None, float]] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.fullmatch(line)
        if not sample:
            raise UserError(f"{name}:{number}", line, "is not a Prometheus sample")
        metric, labels, value = sample.groups()
        le = dict(_LABEL.findall(labels or "")).get("le")
        bound = None if le is None else _number(name, number, le)
        of_metric = samples.setdefault(metric, {})
        of_metric[bound] = of_metric.get(bound, 0.0) + _number(name, number, value)
    return samples


def labels_of(name: str, text: str) -> list[dict[str, str]]:
    """Return the labels of each sample of `name` in a snapshot."""
    return [dict(_LABEL.findall(sample[2] or "")) for sample in _matching(name, text)]


def total_of(name: str, text: str) -> float | None:
    """Return the sum of all samples of `name` in a snapshot, over all labels; None if there is none."""
    try:
        values = [float(sample[3]) for sample in _matching(name, text)]
    except ValueError:
        return None
    return sum(values) if values else None


def _matching(name: str, text: str) -> Iterator[re.Match[str]]:
    for line in text.splitlines():
        if (sample := _SAMPLE.fullmatch(line.strip())) and sample[1] == name:
            yield sample


def _number(name: str, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}:{line}", text, "is not a number") from None


def made_up_workload(
    window: Window, window_s: float, name: str, *, seed: int = 0, lasting_s: float | None = None, burstiness: float = 1
) -> Workload:
    """Return requests with the means of those that ended in the window, for `lasting_s` or as long as the window.

    `burstiness` is the squared coefficient of variation of the gaps between arrivals: 1 is Poisson. Raises UserError if
    no request ended in the window.
    """
    prompts, outputs = window.histogram("vllm:request_prompt_tokens"), window.histogram(OUTPUT_TOKENS)
    count = round(outputs.count)
    if count < 1:
        raise UserError("measured.after", name, "no request ended between the two snapshots; take them further apart")
    wanted = count if lasting_s is None else max(round(count * lasting_s / window_s), 1)
    draw = random.Random(seed)
    shared = shared_share(window)
    lengths: list[tuple[int, int]] = []
    while len(lengths) < wanted:
        lengths += zip(_drawn(prompts, count, draw), _drawn(outputs, count, draw), strict=True)
    requests, now_s = [], 0.0
    for id_, (prompt, output) in enumerate(lengths[:wanted]):
        hit = round(prompt * shared)
        parts = prompt_of(("prefix", hit), (PRIVATE, prompt - hit))
        requests.append(WorkloadRequest(id_, round(now_s * 1e9), parts, output))
        gap_s = window_s / count
        now_s += (
            draw.expovariate(1 / gap_s) if burstiness == 1 else draw.gammavariate(1 / burstiness, burstiness * gap_s)
        )
    return Workload(requests, name=name, shares_prefixes=shared > 0)


class Prometheus(Settings):
    """Two snapshots of one engine that were taken `window_s` seconds apart."""

    format: Literal["prometheus"] = "prometheus"
    before: str
    after: str
    window_s: float = Field(gt=0, allow_inf_nan=False)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. TTFT is from the arrival at the API server."""
        window = Window.between(data / self.before, data / self.after)
        workload = made_up_workload(window, self.window_s, Path(self.after).stem, seed=self.seed)
        count = round(window.histogram(OUTPUT_TOKENS).count)
        figures = {figure: 1e3 * _first(window, names).mean for figure, names in _LATENCIES.items()}
        figures["request_throughput"] = count / self.window_s
        figures["output_throughput"] = window.counter("vllm:generation_tokens_total") / self.window_s
        return [MeasuredRun("window", workload, figures, caution="arrivals and lengths are drawn to match histograms")]


def _first(window: Window, names: tuple[str, ...]) -> Histogram:
    """Return the first histogram of `names` (newest name first) that the engine exports."""
    return window.histogram(next((name for name in names if window.has(f"{name}_bucket")), names[0]))


def shared_share(window: Window) -> float:
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
