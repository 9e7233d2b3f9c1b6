"""The tables of a recording or in memory that metrics read, their columns as arrays, and statistics of columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.traces.recording import Recording
from tokentwin.traces.schema import DATASETS

_NOTHING = pa.table({})
Floats = NDArray[np.float64]

_PIECE = 1 << 18


def numbers(table: pa.Table, name: str) -> Floats:
    """Return a numeric column as float64, with NaN for null. It is exact up to 2**53 ns, which is 104 days."""
    return pc.cast(table.column(name), pa.float64(), safe=False).to_numpy()


def as_stored(table: pa.Table, name: str) -> NDArray[Any]:
    """Return a numeric column without a copy in its stored type, or as float64 if it has nulls."""
    column = table.column(name)
    return numbers(table, name) if column.null_count else column.to_numpy()


def has_value(table: pa.Table, name: str) -> bool:
    """Return True if some row has a value in this column, which may be missing in older recordings."""
    return name in table.column_names and table.column(name).null_count < table.num_rows


def known_or_zero(table: pa.Table, name: str) -> Floats:
    """Return a column with 0 for null, or an array of a single 0 if no row has a value."""
    return np.nan_to_num(numbers(table, name)) if has_value(table, name) else np.zeros(1)


def known(values: Floats) -> Floats:
    """Return the values that are not NaN; copies only if there is a NaN."""
    missing = np.isnan(values)
    return values[~missing] if missing.any() else values


def ratio(numerator: Floats | float, denominator: Floats) -> Floats:
    """Return `numerator` / `denominator`, with NaN for a denominator that is not above 0."""
    return np.divide(numerator, denominator, out=np.full(len(denominator), np.nan), where=denominator > 0)


def weighted_mean(values: Floats, weights: Floats) -> float:
    """Return the mean of `values` weighted by `weights`, or the plain mean if all weights are 0.

    The mean is computed in pieces, so that there is no array of millions of products.
    """
    total = float(weights.sum())
    if not total > 0:
        return float(values.mean())
    pieces = (slice(at, at + _PIECE) for at in range(0, len(values), _PIECE))
    return sum(float((values[piece] * weights[piece]).sum()) for piece in pieces) / total


def over(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio of two numbers, or None if either is not known or the denominator is 0."""
    if numerator is None or not denominator or not math.isfinite(denominator):
        return None
    return float(numerator / denominator)


def gaps_ms(times: pa.ChunkedArray) -> Floats:
    """Return the gaps in milliseconds between consecutive entries of each list of `times` (ns), as one array."""
    gaps = [np.empty(0)]
    for chunk in times.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))[:-1]
        gap = np.diff(flat)
        inside = np.ones(len(gap), dtype=bool)
        inside[ends[(ends > 0) & (ends < len(flat))] - 1] = False
        gaps.append(gap[inside] / 1e6)
    return np.concatenate(gaps)


class MemoryTables:
    """Datasets in memory with the interface of a recording. A dataset that is not given has no rows."""

    def __init__(self, **datasets: pa.Table) -> None:
        self._tables = {"requests": _NOTHING, "steps": _NOTHING, **datasets}

    def table(self, dataset: str, columns: Sequence[str]) -> pa.Table:
        stored = self._tables[dataset]
        present = set(stored.column_names)
        return pa.table({name: stored[name] if name in present else self._null(dataset, name) for name in columns})

    def _null(self, dataset: str, name: str) -> pa.Array:
        (type_,) = (column.type for column in DATASETS[dataset] if column.name == name)
        return pa.nulls(self.rows(dataset), type_)

    def pieces(self, dataset: str, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        table = self.table(dataset, columns)
        return (table.slice(at, rows) for at in range(0, table.num_rows, rows))

    def rows(self, dataset: str) -> int:
        return int(self._tables[dataset].num_rows)

    def filled(self, dataset: str, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if has_value(self._tables[dataset], name)]

    def most_items(self, dataset: str, column: str) -> int:
        """Return an upper bound of the number of items in all lists of a column."""
        return sum(len(chunk.values) for chunk in self.table(dataset, [column]).column(0).chunks)


Datasets = Recording | MemoryTables
"""The tables that metrics read. A missing column is null."""


PERCENTILES = (50, 90, 95, 99)
_CACHED = 1 << 16  # number of values per piece: their differences from the mean fit into a CPU cache


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
    if len(values) > _CACHED:
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
