"""The MLP of a dense layer, or the expert of a mixture that every token passes."""

from __future__ import annotations

import torch

from realengine.layer_ops import LayerOps
from realengine.loading import WeightLoader
from realengine.op_times import OpTimes
from realengine.projection import Fp8Rows


class DenseMlp:
    """SwiGLU (Shazeer 2020), with gate and up in one GEMM. `weights` gives those of the modules named."""

    def __init__(self, weights: WeightLoader, gate: str, up: str, down: str) -> None:
        self._gate_up, self._down = weights.projection([gate, up]), weights.projection([down])
        self.fp8 = self._gate_up.fp8

    def __call__(self, x: torch.Tensor | Fp8Rows, ops: LayerOps, times: OpTimes) -> torch.Tensor:
        """`x` `[T, hidden]` to the same."""
        with times("gate_up"):
            gate_up = self._gate_up(x)
        with times("silu_mul"):
            product = ops.silu_mul(gate_up, self._down.fp8)
        with times("down"):
            return self._down(product)
