"""Matrix products with weights: plain, or in FP8 (e4m3) with a scale per output channel and per token.

Products with packed integers are in the kernels (`triton_ops`) or, as a reference, plain products with the numbers that
the integers stand for.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Rows(NamedTuple):
    """Activations in e4m3 `[rows, n]`, the float32 scales `[rows, 1]` that give them back, and their former type."""

    rows: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, x: torch.Tensor) -> Fp8Rows:
        return cls(*quantised(x), x.dtype)


class Projection(Protocol):
    """Linear layers that share their input: `[rows, in]` to `[rows, out]`, both in the data type of the model.

    Attributes:
        fp8: whether it computes in FP8; its best input is then `Fp8Rows`, which spares a pass over its input
    """

    fp8: bool

    def __call__(self, x: Any) -> torch.Tensor: ...


class DenseProjection:
    """Linear layers in the data type of the model."""

    fp8 = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)


class Fp8Projection:
    """Weights in e4m3 and activations rounded token by token; products are accumulated in float32.

    Attributes:
        weight: [out, in] e4m3
        scale: [out, 1] float32, which give the weights back
    """

    fp8 = True

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._scale, self._bias = weight, scale.t().contiguous(), bias

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        rows, scale, dtype = x if isinstance(x, Fp8Rows) else Fp8Rows.from_tensor(x)
        out = torch._scaled_mm(rows, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=torch.bfloat16)
        return out.to(dtype) if self._bias is None else out.to(dtype) + self._bias


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` `[rows, n]` as e4m3, and float32 scales `[rows, 1]` that give it back: largest value / 448."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale
