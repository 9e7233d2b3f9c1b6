"""Statistics of many values: mean, spread, and percentiles, each of which is one of the values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.tables import Floats, known

PERCENTILES = (50, 90, 95, 99)
_PIECE = 1 << 16  # number of values whose differences from the mean fit into a CPU cache


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
        """Return the distribution of `values` without NaN.

        If `spent` is True, the order of `values` may be changed, which saves a copy.
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
    """Return exact nearest-rank percentiles: percentile q of n sorted values is value ceil(q n / 100), from 1."""
    at = [max(-(-q * len(values) // 100), 1) - 1 for q in ranks]
    ordered = values if spent else values.copy()
    ordered.partition(sorted(set(at)))
    return [float(ordered[i]) for i in at]


def _squares(values: Floats, mean: float) -> float:
    """Return the sum of squared differences from the mean.

    The values are split at the same points as in numpy's sums, so the result is bit for bit that of `std`.
    """
    if len(values) > _PIECE:
        half = len(values) // 2 // 8 * 8
        return _squares(values[:half], mean) + _squares(values[half:], mean)
    differences = values - mean
    return float((differences * differences).sum())


def ecdf(values: NDArray[Any], points: int = 400) -> tuple[Floats, Floats]:
    """Return at most `points` of the values in ascending order, with the percentage of all values that are no larger.

    This is the empirical distribution without NaN. Half of the points are spread evenly over the ranks. The other half
    are denser towards the largest values, to show the tail in detail.
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
