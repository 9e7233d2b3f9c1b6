"""The metrics of a server at one moment, and the change between two moments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import Metric

Key = tuple[str, str]  # a sample's name without `vllm:`, and the replica's number

GAUGES = {
    "num_requests_running": "running (requests)",
    "num_requests_waiting": "waiting (requests)",
    "kv_cache_usage_perc": "KV in use (%)",
}
LATENCIES = {
    "time_to_first_token_seconds": "TTFT",
    "request_time_per_output_token_seconds": "TPOT",
    "inter_token_latency_seconds": "ITL",
    "e2e_request_latency_seconds": "E2E",
}
_TOKENS = "generation_tokens_total"


@dataclass(frozen=True)
class Snapshot:
    """Values by sample and replica; for histograms the counts up to each bound, in order."""

    seconds: float
    values: dict[Key, float]
    buckets: dict[str, dict[float, float]]

    @classmethod
    def from_families(cls, seconds: float, families: Iterable[Metric]) -> Snapshot:
        """Read an exposition; only vLLM's families are kept. Replicas' buckets are summed."""
        values: dict[Key, float] = {}
        buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for family in families:
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:")
                if "le" in sample.labels:
                    buckets[name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
                elif sample.name != name:
                    values[name, sample.labels.get("engine", "")] = sample.value
        return cls(seconds, values, {name: dict(sorted(counts.items())) for name, counts in buckets.items()})

    @property
    def replicas(self) -> list[str]:
        """The numbers of the replicas that are alive."""
        return sorted({replica for name, replica in self.values if name in GAUGES}, key=lambda text: (len(text), text))

    def total(self, name: str) -> float:
        """Return a value, summed over the replicas."""
        return sum(value for (family, _), value in self.values.items() if family == name)


def tokens_per_second(history: Sequence[Snapshot]) -> tuple[list[float], list[float]]:
    """Return the times of snapshots, and the output tokens per second since the snapshot before each."""
    times, rates = [], []
    for before, after in pairwise(history):
        grown = after.total(_TOKENS) - before.total(_TOKENS)
        if after.seconds > before.seconds and grown >= 0:  # a server that was started again counts from 0
            times.append(after.seconds)
            rates.append(grown / (after.seconds - before.seconds))
    return times, rates


def values_between(before: Snapshot, after: Snapshot, name: str) -> float:
    """Return the number of values of a histogram between two snapshots; 0 if the server was started again."""
    counts = (max(snapshot.buckets.get(name, {}).values(), default=0.0) for snapshot in (after, before))
    return max(next(counts) - next(counts), 0.0)


def quantile_ms(before: Snapshot, after: Snapshot, name: str, share: float) -> float:
    """Return a quantile in ms of the values between two snapshots, by the rule of Prometheus' `histogram_quantile`.

    It is linear within a bucket. NaN if there were no values.
    """
    earlier = before.buckets.get(name, {})
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items()]
    if not counts or counts[-1][1] <= 0 or min(count for _, count in counts) < 0:
        return math.nan
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound) or count == below:
                return 1e3 * low
            return 1e3 * (low + (bound - low) * (rank - below) / (count - below))
        low, below = bound, count
    return 1e3 * low
