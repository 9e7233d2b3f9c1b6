"""The tier of each KV block: one list, the last used first, cut where a tier is full.

A block is in one tier. A block that is used goes to the head of the first tier; a block that is pushed out of a tier
goes to the head of the next. So a larger capacity holds all blocks that a smaller one holds (LRU is a stack algorithm:
Mattson et al. 1970).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class TieredCache:
    """The keys of blocks in tiers of `capacities` blocks each."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        self._tiers: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]  # the last used last

    def tier(self, key: bytes) -> int | None:
        """Return the number of the tier in which `key` lies; None if it is in none."""
        for number, keys in enumerate(self._tiers):
            if key in keys:
                return number
        return None

    def use(self, key: bytes) -> list[tuple[bytes, int]]:
        """Put `key` first; return keys that were pushed down for it, each with its new tier (past the last: gone)."""
        first = self._tiers[0]
        if key in first:
            first.move_to_end(key)
            return []
        for keys in self._tiers[1:]:
            if key in keys:
                del keys[key]
                break
        pushed = []
        for number, keys in enumerate(self._tiers):
            keys[key] = None
            if len(keys) <= self._capacities[number]:
                break
            key, _ = keys.popitem(last=False)
            pushed.append((key, number + 1))
        return pushed

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def check(self) -> None:
        """Raise AssertionError unless every tier keeps to its capacity and no key is in two."""
        for keys, capacity in zip(self._tiers, self._capacities, strict=True):
            assert len(keys) <= capacity
        assert len({key for keys in self._tiers for key in keys}) == len(self)
