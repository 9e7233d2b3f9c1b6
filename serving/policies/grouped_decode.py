"""Steady decode of models with sliding windows: a crossing takes a block for each group of layers.

The module does not count on blocks that the same steps free, because a request may have its turn before they are free.
Steps that it refuses go through the rules one by one.
"""

from __future__ import annotations

from serving.kv.grouped_pool import GroupedPool
from serving.policies.steady_decode import SteadyDecode
from serving.request import Request


class GroupedDecode(SteadyDecode):
    """A `SteadyDecode` over a `GroupedPool`."""

    def rows_beside(self, budget: int) -> list[tuple[Request, int]] | None:
        rows = super().rows_beside(budget)
        if rows is None:
            return None
        lacking = sum(max(self._rules.lacking_blocks(request, tokens), 0) for request, tokens in rows)
        need = self._groups * len(self._decodes.at_block_start()) + lacking
        return rows if need <= self._pool.free else None

    def steps(self) -> int:
        steps = super().steps()
        while steps and self._groups * self._decodes.block_starts(steps) > self._pool.free:
            steps //= 2
        return steps

    @property
    def _groups(self) -> int:
        assert isinstance(self._pool, GroupedPool)
        return self._pool.groups
