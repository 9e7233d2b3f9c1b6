"""The empirical distribution of a metric, as few points as a figure needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ecdf(values: NDArray[Any], points: int = 400) -> tuple[Floats, Floats]:
    """At most `points` of the values in ascending order, and the percentage of all that are no larger; NaN is left out.

    Half of the points are spread evenly over the ranks, half crowd towards the largest values, so that the tail keeps
    its detail.
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
