"""Numbers of replicas over time in a recorded run, and the GPU time that was paid for.

A replica occupies its GPUs from its start to its end, so cold starts, drains and recoveries are paid for. It takes
requests from the time when it is ready. The functions take the column `replica_lives` of the dataset `runs`, which has
start, ready and end times of each replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Lives = Sequence[Mapping[str, Any]]


def gpu_hours(lives: Lives, duration_ns: int) -> float:
    """Return the GPU hours that all replicas were paid for until the end of the run."""
    return sum(_end(life, duration_ns, life["started_ns"]) * life["gpus"] for life in lives) / 3.6e12


def cost_usd(lives: Lives, duration_ns: int, usd_per_gpu_hour: Mapping[str, float | None]) -> float | None:
    """Return the cost in dollars of the GPU hours of `lives`, at the prices of their pools.

    The result is None if a pool with a replica has no price.
    """
    usd = 0.0
    for pool in dict.fromkeys(life["pool"] for life in lives):
        price = usd_per_gpu_hour.get(pool)
        if price is None:
            return None
        usd += price * gpu_hours([life for life in lives if life["pool"] == pool], duration_ns)
    return usd


def serving_ns(lives: Lives, duration_ns: int) -> int:
    """Return the nanoseconds during which replicas were ready, summed over the replicas."""
    return sum(_end(life, duration_ns, life["ready_ns"]) for life in lives if life["ready_ns"] is not None)


def unserved_ns(lives: Lives, duration_ns: int) -> int:
    """Return the nanoseconds without a ready replica after the first one was ready; `lives` is for one pool."""
    timeline = [change for change in replica_counts(lives) if change["time_ns"] < duration_ns]
    began = next((at for at, change in enumerate(timeline) if change["ready"]), len(timeline))
    times = [*(change["time_ns"] for change in timeline), duration_ns]
    return sum(times[at + 1] - times[at] for at in range(began, len(timeline)) if not timeline[at]["ready"])


def replica_counts(lives: Lives) -> list[dict[str, Any]]:
    """Return a row for each change: `time_ns`, `pool`, and the pool's new numbers of `paid` and `ready` replicas."""
    changes: dict[tuple[int, str], list[int]] = {}
    for life in lives:
        for name, paid, ready in (("started_ns", 1, 0), ("ready_ns", 0, 1)):
            if life[name] is not None:
                _change(changes, life[name], life["pool"], paid, ready)
        if life["ended_ns"] is not None:
            _change(changes, life["ended_ns"], life["pool"], -1, -(life["ready_ns"] is not None))
    counts: dict[str, list[int]] = {}
    timeline = []
    for (time_ns, pool), (paid, ready) in sorted(changes.items()):
        count = counts.setdefault(pool, [0, 0])
        count[0] += paid
        count[1] += ready
        timeline.append({"time_ns": time_ns, "pool": pool, "paid": count[0], "ready": count[1]})
    return timeline


def _change(changes: dict[tuple[int, str], list[int]], time_ns: int, pool: str, paid: int, ready: int) -> None:
    change = changes.setdefault((time_ns, pool), [0, 0])
    change[0] += paid
    change[1] += ready


def _end(life: Mapping[str, Any], duration_ns: int, from_ns: int) -> int:
    """Return the nanoseconds from `from_ns` to the end of the replica or of the run."""
    return int((duration_ns if life["ended_ns"] is None else life["ended_ns"]) - from_ns)
