"""Linear layers with weights of 4 or 8 bits, through our kernel: nothing is made wide in memory."""

from __future__ import annotations

import torch

from realengine.kernels.packed_gemm import kernel_weight, packed_gemm
from realengine.stored_weight import PackedWeight


class PackedProjection:
    """A `Projection` of `weight` on a GPU."""

    fp8 = False

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = kernel_weight(weight), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = packed_gemm(x, self._weight)
        return out if self._bias is None else out + self._bias
