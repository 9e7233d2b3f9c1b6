"""The figures that are reported of many values: mean, spread, and percentiles that are values which occurred."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.tables import Floats, known

PERCENTILES = (50, 90, 95, 99)
_PIECE = 1 << 16  # values: so many differences from the mean fit a cache


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, spread and percentiles of many values. Without values, `count` is 0 and the rest is NaN."""

    mean: float
    std: float
    min: float
    max: float
    count: int
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def from_values(cls, values: NDArray[Any], spent: bool = False) -> Distribution:
        """Return the distribution of `values`; NaN means no value and is left out.

        With `spent`, the order of `values` may be changed: millions of them then need no copy.
        """
        values = known(np.asarray(values, dtype=np.float64))
        if not len(values):
            nan = math.nan
            return cls(nan, nan, nan, nan, 0, nan, nan, nan, nan)
        mean = float(values.mean())
        spread = (mean, math.sqrt(_squares(values, mean) / len(values)), float(values.min()), float(values.max()))
        return cls(*spread, len(values), *percentiles(values, PERCENTILES, spent))

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def percentiles(values: NDArray[Any], ranks: tuple[int, ...], spent: bool = False) -> list[float]:
    """Return exact nearest-rank percentiles: p*q* of n sorted values is number ceil(q n / 100), counted from 1."""
    at = [max(-(-q * len(values) // 100), 1) - 1 for q in ranks]
    ordered = values if spent else values.copy()
    ordered.partition(sorted(set(at)))
    return [float(ordered[i]) for i in at]


def _squares(values: Floats, mean: float) -> float:
    """Return the sum of squared differences from the mean.

    The values are halved where numpy halves a sum, so the result equals that of `std` to the bit.
    """
    if len(values) > _PIECE:
        half = len(values) // 2 // 8 * 8
        return _squares(values[:half], mean) + _squares(values[half:], mean)
    differences = values - mean
    return float((differences * differences).sum())


def ecdf(values: NDArray[Any], points: int = 400) -> tuple[Floats, Floats]:
    """Return at most `points` of the values in ascending order, with the percentage of all values that are no larger.

    This is the empirical distribution; NaN is left out. Half of the points are spread evenly over the ranks, and half
    crowd towards the largest values, so that the tail keeps its detail.
    """
    ordered = np.sort(values[~np.isnan(values)])
    n = len(ordered)
    if n <= points:
        ranks = np.arange(n)
    else:
        even = np.linspace(0, n - 1, points // 2)
        tail = n - np.geomspace(1, n, points // 2)
        ranks = np.unique(np.concatenate([even, tail]).round().astype(int))
    return ordered[ranks], 100.0 * (ranks + 1) / n if n else np.empty(0)
