"""Matrix products with weights: plain, or in FP8 (e4m3) with a scale per output channel and per token.

Those with packed integers are the kernels' (`packed_projection`) or, as a reference, plain ones of what they stand for.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import linear

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Projection(Protocol):
    """Linear layers that share their input: `[rows, in]` to `[rows, out]`, both in the data type of the model."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseProjection:
    """In the data type of the model."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class Fp8Projection:
    """Weights in e4m3, activations rounded token by token as they come; products are accumulated in float32.

    weight  [out, in] e4m3
    scale   [out, 1] float32, which give the weights back
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._scale, self._bias = weight, scale.t().contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, scale = quantised(x)
        out = torch._scaled_mm(rows, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=torch.bfloat16)
        return out.to(x.dtype) if self._bias is None else out.to(x.dtype) + self._bias


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[rows, n]` as e4m3 and the float32 scales `[rows, 1]` that give it back: largest value / 448 by row."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale
