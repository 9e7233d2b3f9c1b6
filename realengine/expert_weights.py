"""Weights of the experts of a layer, stacked one by one, so that none need exist twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from realengine.fp8_weight import Fp8Weight
from realengine.packed_weight import PackedWeight

StoredWeight = (
    torch.Tensor | Fp8Weight | PackedWeight
)  # of a linear layer [out, in]; a tensor is as it is computed with


def stacked(weights: Iterable[Any], count: int) -> Any:
    """`count` tensors, or named tuples of them, as one of the same kind with a dimension for experts in front.

    What is not a tensor must be the same in all of them.
    """
    parts: list[Any] = []
    for place, weight in enumerate(weights):
        fields = (weight,) if isinstance(weight, torch.Tensor) else weight
        if not place:
            parts = [part.new_empty(count, *part.shape) if isinstance(part, torch.Tensor) else part for part in fields]
        for into, part in zip(parts, fields, strict=True):
            if isinstance(part, torch.Tensor):
                into[place] = part
    return parts[0] if isinstance(weight, torch.Tensor) else type(weight)(*parts)
