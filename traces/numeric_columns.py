"""Columns of a recording as numpy arrays, NaN where nothing is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PIECE = 1 << 18


def numbers(table: pa.Table, name: str) -> Floats:
    """A numeric column as float64, NaN for null. Exact up to 2**53 ns, a hundred days."""
    return pc.cast(table.column(name), pa.float64(), safe=False).to_numpy()


def stored(table: pa.Table, name: str) -> NDArray[Any]:
    """A numeric column as it is stored, as float64 if it has nulls: of millions of steps, a copy takes longer."""
    column = table.column(name)
    return numbers(table, name) if column.null_count else column.to_numpy()


def has_value(table: pa.Table, name: str) -> bool:
    """Whether a column, which older recordings and other engines may not have, is known of any row."""
    return name in table.column_names and table.column(name).null_count < table.num_rows


def known_or_zero(table: pa.Table, name: str) -> Floats:
    """Such a column, 0 where nothing is known; one 0 if nowhere."""
    return np.nan_to_num(numbers(table, name)) if has_value(table, name) else np.zeros(1)


def known(values: Floats) -> Floats:
    """The values that are no NaN; a copy only if there is one."""
    missing = np.isnan(values)
    return values[~missing] if missing.any() else values


def ratio(numerator: Floats | float, denominator: Floats) -> Floats:
    """One over the other; NaN where there is nothing below."""
    return np.divide(numerator, denominator, out=np.full(len(denominator), np.nan), where=denominator > 0)


def weighted_mean(values: Floats, weights: Floats) -> float:
    """The mean of `values` by `weights`; if these are all 0, the plain one. Products of millions are not kept."""
    total = float(weights.sum())
    if not total > 0:
        return float(values.mean())
    pieces = (slice(at, at + _PIECE) for at in range(0, len(values), _PIECE))
    return sum(float((values[piece] * weights[piece]).sum()) for piece in pieces) / total


def over(numerator: float | None, denominator: float | None) -> float | None:
    """The same of two numbers; None where either is not known."""
    if numerator is None or not denominator or not math.isfinite(denominator):
        return None
    return float(numerator / denominator)


def gaps_ms(times: pa.ChunkedArray) -> Floats:
    """Milliseconds between consecutive entries of each list of `times`, in nanoseconds, pooled in order."""
    gaps = [np.empty(0)]
    for chunk in times.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))[:-1]
        gap = np.diff(flat)
        inside = np.ones(len(gap), dtype=bool)
        inside[ends[(ends > 0) & (ends < len(flat))] - 1] = False
        gaps.append(gap[inside] / 1e6)
    return np.concatenate(gaps)
