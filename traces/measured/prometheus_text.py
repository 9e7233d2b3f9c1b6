"""The text format in which Prometheus scrapes an engine, and what happened between two scrapes.

https://prometheus.io/docs/instrumenting/exposition_formats/. Counters and histograms only grow, so the difference of
two snapshots is a window. Percentiles of a histogram are known no closer than its bucket: they come as bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import UserError
from traces.formats.rows import read_head

_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?\d+)?')
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:\\.|[^"\\])*)"')
_LARGEST = 1 << 28

Samples = Mapping[str, Mapping[float | None, float]]  # name -> upper bound of the bucket, or None -> value


@dataclass(frozen=True)
class Histogram:
    """Counts by bucket: `bounds` are upper ends, the last infinite; `counts` are of each bucket alone."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Exact: the sum is kept beside the buckets."""
        return self.total / self.count


class Window:
    """What happened between two snapshots of one engine; samples of all label sets are added up."""

    def __init__(self, before: Path, after: Path) -> None:
        self._after_path = after
        self._before, self._after = read_samples(before), read_samples(after)

    def counter(self, name: str) -> float:
        """By how much a counter grew. Raises UserError when it is not there or went down."""
        return self._growth(name, None)

    def has(self, name: str) -> bool:
        return name in self._after

    def histogram(self, name: str) -> Histogram:
        """Return the values of a histogram."""
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
    """Every sample of a snapshot, added up over its labels but `le`. Raises UserError that names the line."""
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


def _number(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{path}:{line}", text, "is not a number") from None
