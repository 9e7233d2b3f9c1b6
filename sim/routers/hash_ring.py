"""Consistent hashing: a key keeps its replica when other replicas join or leave (Karger et al. 1997)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from hashlib import blake2b

from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet

_POINTS = 64  # points of each replica on the ring; shares of the ring differ by about 1 / sqrt(64)


class HashRing:
    """The members of a `ReplicaSet` as points on a ring, which is made anew when the members change."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._points: list[tuple[int, int]] = []  # (hash, index of the member in the set)
        self._of_replica: dict[int, list[int]] = {}

    def successors(self, key: str, replicas: ReplicaSet) -> Iterator[Replica]:
        """Yield the replicas of all points of the ring, in order from the place of `key` on; replicas repeat."""
        self._follow(replicas)
        start = bisect_right(self._points, (_hash(key), -1))
        for step in range(len(self._points)):
            yield replicas[self._points[(start + step) % len(self._points)][1]]

    def _follow(self, replicas: ReplicaSet) -> None:
        seen = id(replicas), replicas.version
        if seen != self._seen:
            self._seen = seen
            self._points = sorted((point, at) for at, r in enumerate(replicas) for point in self._points_of(r.index))

    def _points_of(self, index: int) -> list[int]:
        points = self._of_replica.get(index)
        if points is None:
            points = self._of_replica[index] = [_hash(f"{index}.{number}") for number in range(_POINTS)]
        return points


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
