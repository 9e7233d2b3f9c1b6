"""Reducing what a run recorded to what a screen can show, on the server and without losing peaks.

Everything is numpy on whole columns; a million points come down to a few thousand in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP_SERIES = ("waiting", "running", "used_blocks")


def column(table: pa.Table, name: str) -> Floats:
    """A numeric column as float64, NaN for null."""
    values: Floats = table.column(name).cast(pa.float64(), safe=False).to_numpy()
    return values


def ecdf(values: NDArray[Any], points: int = 400) -> tuple[Floats, Floats]:
    """The empirical distribution in percent, as at most `points` of its own values; the tail keeps its detail.

    Half of the points are spread evenly over the ranks, half crowd towards the largest values.
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


def thin(count: int, most: int) -> NDArray[np.int64]:
    """Indices of at most `most` of `count` rows, evenly spaced: the same ones every time."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).astype(np.int64)


def envelope(times: Floats, values: Floats, buckets: int = 700) -> tuple[Floats, Floats]:
    """A series with at most two points a bucket of time, its lowest and its highest, so that no peak is lost."""
    n = len(times)
    if n <= 2 * buckets:
        return times, values
    edges = np.linspace(times[0], times[-1], buckets + 1)
    starts = np.unique(np.searchsorted(times, edges[:-1], side="left"))
    starts = starts[starts < n]
    kept = {n - 1}
    for begin, end in pairwise([*starts.tolist(), n]):
        inside = values[begin:end]
        kept |= {begin + int(inside.argmin()), begin + int(inside.argmax())}
    chosen = np.array(sorted(kept))
    return times[chosen], values[chosen]


def bucket_means(times: Floats, values: Floats, buckets: int = 700) -> tuple[Floats, Floats]:
    """A series as the mean of each bucket of time that has any; short series stay as they are."""
    if len(times) <= buckets:
        return times, values
    edges = np.linspace(times[0], times[-1], buckets + 1)
    bucket = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, buckets - 1)
    counts = np.bincount(bucket, minlength=buckets)
    sums = np.bincount(bucket, weights=values, minlength=buckets)
    full = counts > 0
    return edges[:-1][full], sums[full] / counts[full]


def held(steps: pa.Table, names: Sequence[str]) -> tuple[Floats, list[Floats]]:
    """Step quantities over time, summed over the replicas: each step's value holds until the next one's start.

    A replica that has had nothing to do for longer than ten usual steps is at zero. Times, and a series for each name.
    """
    if not steps.num_rows:
        return np.empty(0), [np.empty(0) for _ in names]
    numbers = np.nan_to_num(column(steps, "replica")).astype(np.int64)
    # In 16 bits, numpy sorts by counting.
    replica = numbers.astype(np.int16) if numbers.max() <= np.iinfo(np.int16).max else numbers
    start, end = column(steps, "start_ns"), column(steps, "end_ns")
    order = np.argsort(replica, kind="stable")
    if not _in_time(replica[order], start[order]):
        order = np.lexsort((start, replica))
    usual = float(np.median(end - start))
    replica, start, end = replica[order], start[order], end[order]
    idle = np.append((replica[1:] != replica[:-1]) | (start[1:] - end[:-1] > 10 * usual), True)
    at = np.concatenate([start, end[idle]])
    in_time = np.argsort(at, kind="stable")  # of runs that are in order already, which a stable sort only merges
    at = at[in_time]
    last = np.append(at[1:] != at[:-1], True)
    series = []
    for name in names:
        value = np.nan_to_num(column(steps, name))[order]
        change = np.concatenate([value, -value[idle]])
        change[1 : len(value)] -= np.where(idle[:-1], 0.0, value[:-1])
        series.append(np.cumsum(change[in_time])[last])
    return at[last], series


def _in_time(replica: NDArray[np.integer[Any]], start: Floats) -> bool:
    return bool(np.all((start[1:] >= start[:-1]) | (replica[1:] != replica[:-1])))
