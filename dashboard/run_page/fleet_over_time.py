"""Facts about a fleet that steps do not record: the live replicas, and the outstanding requests.

A request is in no scheduler's queue if it came while no replica was live, or if it is moving between two replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.traces.metrics.run_metrics import ReplicaLives, RunMetrics

Series = tuple[NDArray[Any], NDArray[Any]]  # times in nanoseconds, in order, and the values from then on


class FleetOverTime(NamedTuple):
    """A fleet over a run.

    Attributes:
        live: number of replicas that accept requests or still have some
        blocks: number of KV blocks of each replica; NaN if it is not recorded
        outstanding: number of requests that have arrived and not ended; None for a single replica, whose steps tell it
    """

    live: Series
    blocks: float
    outstanding: Series | None = None

    @classmethod
    def from_run(cls, run: Mapping[str, Any], metrics: RunMetrics) -> FleetOverTime:
        """Return the fleet of a recorded run, by its row of `runs`."""
        several = max(run["replicas"] or 1, len(run["replica_lives"] or [])) > 1
        return cls(
            live_replicas(run["replica_lives"] or [], run["replicas"] or 1),
            float(run["num_blocks"] or "nan"),
            outstanding(*metrics.outstanding) if several else None,
        )


def live_replicas(replica_lives: ReplicaLives, otherwise: int) -> Series:
    """Return the number of live replicas over time; always `otherwise` if replicas' lifetimes are not recorded."""
    if not replica_lives:
        return np.zeros(1), np.array([otherwise])
    ready = np.array(sorted(life["ready_ns"] for life in replica_lives if life["ready_ns"] is not None))
    ended = np.array(
        sorted(life["ended_ns"] for life in replica_lives if None not in (life["ready_ns"], life["ended_ns"]))
    )
    times = np.union1d(ready, ended)
    return times, np.searchsorted(ready, times, side="right") - np.searchsorted(ended, times, side="right")


def outstanding(arrivals: NDArray[Any], ends: NDArray[Any]) -> Series:
    """Return the number of requests that came at `arrivals` and have not left by `ends`; both are sorted."""
    times = np.concatenate([arrivals, ends])
    order = np.argsort(times, kind="stable")  # a stable sort only merges two sorted series
    counts = np.cumsum(np.where(order < len(arrivals), 1, -1))
    times = times[order]
    final = np.append(times[1:] != times[:-1], [True] * min(len(times), 1))
    return times[final], counts[final]
