"""The metrics of a server at one moment, and the change between two moments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from prometheus_client import Metric

from tokentwin.serving.answers.figures import shown_time

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
_NARROW = 1.2  # largest ratio of the bounds of a bucket within which a quantile is interpolated


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
    counts = _between(before, after, name)
    return counts[-1][1] if counts else 0.0


class Quantile(NamedTuple):
    """A quantile of a histogram: `ms` is `at most` or `over` a bound, or within 15 % (`how` is then empty)."""

    ms: float
    how: Literal["", "at most", "over"] = ""

    def __str__(self) -> str:
        return f"{self.how} {shown_time(self.ms)}" if self.how else shown_time(self.ms, digits=2)


def quantile(before: Snapshot, after: Snapshot, name: str, share: float) -> Quantile | None:
    """Return a quantile of the values between two snapshots, as exactly as the server's buckets tell; None without.

    Within a narrow bucket it is interpolated, as Prometheus does. A wide bucket tells only its upper bound.
    """
    counts = _between(before, after, name)
    if not counts:
        return None
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if math.isinf(bound):
            break
        if count >= rank and bound > _NARROW * low:
            return Quantile(1e3 * bound, "at most")
        if count >= rank:
            return Quantile(1e3 * (low + (bound - low) * (rank - below) / (count - below)))
        low, below = bound, count
    return Quantile(1e3 * low, "over")


def _between(before: Snapshot, after: Snapshot, name: str) -> list[tuple[float, float]]:
    """Return the bounds of a histogram, in order, each with the number of values up to it between two snapshots.

    The list is empty without values, or if the server was started again.
    """
    earlier = before.buckets.get(name, {})
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items()]
    return counts if counts and counts[-1][1] > 0 and min(count for _, count in counts) >= 0 else []
