"""Random packed weights: what the kernels of 4 and 8 bits are checked and timed on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from realengine.gpu_suite.ragged_batch import Numbers
from realengine.stored_weight import PackedWeight


class Packing(NamedTuple):
    """Sizes of a packed weight: `zeros` if groups have a zero point; `group` 0 is all inputs."""

    outputs: int
    inputs: int
    bits: int
    group: int = 0
    zeros: bool = False

    def weight(self, numbers: Numbers, dtype: torch.dtype) -> PackedWeight:
        """Random words, and scales with which its products are about as large as the activations."""
        group = self.group or self.inputs
        words = numbers(self.outputs, self.inputs * self.bits // 32, dtype=torch.float32, scale=1e9).to(torch.int32)
        scale = numbers(self.outputs, -(-self.inputs // group), dtype=dtype, scale=2.0**-self.bits * self.inputs**-0.5)
        zero = (numbers(*scale.shape, dtype=torch.float32).abs() * 2).to(torch.uint8) if self.zeros else None
        return PackedWeight(words, scale, zero, self.bits, group)

    def dense(self, weight: PackedWeight) -> Tensor:
        """What it stands for, in float64."""
        zero = torch.full_like(weight.scale, 2 ** (self.bits - 1)) if weight.zero is None else weight.zero
        scale, zero = (
            part.double().repeat_interleave(weight.group, 1)[:, : self.inputs] for part in (weight.scale, zero)
        )
        return (weight.integers().double() - zero) * scale
