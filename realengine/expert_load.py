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
    """By a number of devices, 2, 4, 8, ..., that share a layer's experts evenly, in order: tokens on the busiest over
    the mean of all."""
    layers, experts = tokens.shape
    devices = experts & -experts  # the largest power of two that divides them
    loads = tokens.reshape(layers, devices, -1).sum(axis=2) if devices < experts else tokens
    total, found = loads.sum(axis=1), {}
    while devices > 1:
        found[devices] = float((loads.max(axis=1) * devices / total).mean())
        loads, devices = loads[:, ::2] + loads[:, 1::2], devices // 2
    return dict(sorted(found.items()))
