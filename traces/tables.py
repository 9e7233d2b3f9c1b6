"""The tables of a recording or in memory that metrics read, and functions for their columns as numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from traces.recording import Recording
from traces.schema import DATASETS

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

    It is computed in pieces, so that there is no array of millions of products.
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
