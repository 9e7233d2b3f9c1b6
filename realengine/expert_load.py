"""How evenly the tokens of a step chose the experts of a mixture: what a cost model has to assume, counted.

Both are means over the layers, because a step goes through all of them. `tokens` `[layers, experts]` are the tokens of
each expert.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def experts_hit(tokens: NDArray[np.int32]) -> float:
    """Experts of a layer that got any token: those whose weights are read."""
    return float((tokens > 0).sum(axis=1).mean())


def expert_imbalance(tokens: NDArray[np.int32]) -> dict[int, float]:
    """By each number of devices, in order, that can share a layer's experts evenly: tokens on the busiest over the
    mean of all."""
    layers, experts = tokens.shape
    total = tokens.sum(axis=1)

    def of(devices: int) -> float:
        loads = tokens.reshape(layers, devices, -1).sum(axis=2)
        return float((loads.max(axis=1) * devices / total).mean())

    return {devices: of(devices) for devices in range(2, experts + 1) if experts % devices == 0}
