"""Reducing what a run recorded to what a screen can show, on the server and without losing peaks.

Everything is numpy on whole columns; a million points come down to a few thousand in milliseconds.
"""

from __future__ import annotations

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
    bucket = np.zeros(n, dtype=np.int64)
    bucket[starts[1:]] = 1
    bucket = np.cumsum(bucket)
    order = np.lexsort((values, bucket))
    firsts = np.searchsorted(bucket[order], np.arange(len(starts)), side="left")
    lasts = np.append(firsts[1:], n) - 1
    kept = np.unique(np.concatenate([order[firsts], order[lasts], [n - 1]]))
    return times[kept], values[kept]


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


def held(steps: pa.Table, name: str) -> tuple[Floats, Floats]:
    """A step quantity over time, summed over the replicas: each step's value holds until the next one's start.

    A replica that has had nothing to do for longer than ten usual steps is at zero.
    """
    replicas = np.nan_to_num(column(steps, "replica"))
    start, end, value = column(steps, "start_ns"), column(steps, "end_ns"), column(steps, name)
    times, changes = [np.empty(0)], [np.empty(0)]
    usual = float(np.median(end - start)) if len(start) else 0.0
    for replica in np.unique(replicas):
        mine = np.flatnonzero(replicas == replica)
        mine = mine[np.argsort(start[mine], kind="stable")]
        begins, ends, values = start[mine], end[mine], np.nan_to_num(value[mine])
        idle = np.append(begins[1:] - ends[:-1] > 10 * usual, True)
        at = np.concatenate([begins, ends[idle]])
        to = np.concatenate([values, np.zeros(int(idle.sum()))])
        order = np.argsort(at, kind="stable")
        times.append(at[order])
        changes.append(np.diff(to[order], prepend=0.0))
    at, by = np.concatenate(times), np.concatenate(changes)
    order = np.argsort(at, kind="stable")
    at, total = at[order], np.cumsum(by[order])
    last = np.append(at[1:] != at[:-1], True) if len(at) else np.empty(0, dtype=bool)
    return at[last], total[last]
