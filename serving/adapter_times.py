"""The times that LoRA adapters add to the steps of an engine, and the protocol of a cost model that knows them.

A step without adapters takes no time more: vLLM has CUDA graphs without LoRA kernels for it.
`tokentwin.calibration.adapter_fit` computes the times from the shapes of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

TILE_TOKENS = 64  # tokens of a block of vLLM's LoRA kernels


class AdapterTimes(NamedTuple):
    """Times in nanoseconds.

    Attributes:
        step_ns: time of a step with an adapter; it grows with the number of slots, because kernels look at every slot
        tile_ns: time of each further tile of `TILE_TOKENS` tokens in such a step
        adapter_ns: time of each adapter in the step
        token_ns: time of each token with an adapter
        copy_ns: time to copy an adapter from host memory into a slot
        load_ns: time to load an adapter from disk into host memory
    """

    step_ns: float
    tile_ns: float
    adapter_ns: float
    token_ns: float
    copy_ns: float
    load_ns: float

    def added_ns(self, adapters: Mapping[str, int], tokens: int) -> int:
        """Return the time that `adapters`, with their numbers of tokens, add to a step of `tokens` tokens."""
        if not adapters:
            return 0
        tiles = (tokens - 1) // TILE_TOKENS
        adapted = sum(adapters.values())
        fixed = self.step_ns + tiles * self.tile_ns
        return round(fixed + len(adapters) * self.adapter_ns + adapted * self.token_ns)

    def scaled(self, factor: float) -> AdapterTimes:
        return AdapterTimes(*(factor * ns for ns in self))


FREE = AdapterTimes(0, 0, 0, 0, 0, 0)
"""The times where given step times include them."""


@runtime_checkable
class AdaptedCost(Protocol):
    """A cost model that knows the times of adapters; None if its deployment serves none."""

    @property
    def adapters(self) -> AdapterTimes | None: ...


def adapter_times(cost: object) -> AdapterTimes | None:
    """Return the times of adapters that `cost` knows; None if it knows none."""
    return cost.adapters if isinstance(cost, AdaptedCost) else None
