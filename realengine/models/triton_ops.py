"""The small operations through our Triton kernels: each is one launch, and the device never waits for the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import linear

from realengine.attention.kv_cache import LayerKv
from realengine.kernels.grouped_gemm import ExpertWeights, grouped_mlp
from realengine.kernels.packed_gemm import counters, kernel_weight, packed_gemm, unpacked
from realengine.kernels.rope_store import rope_store
from realengine.kernels.row_operations import add_rms_norm, silu_mul
from realengine.kernels.sampling import argmax, draw, token_mask
from realengine.models.layer_ops import HeadNorms, LayerOps, Rope, Routing
from realengine.models.linear import Fp8Rows, PackedWeight, StoredWeight, stacked
from realengine.step_input import Batch


class PackedProjection:
    """A `Projection` of a 4-bit or 8-bit `weight`.

    Steps of fewer than `unpacked_from` tokens go through our kernel, which converts the weight in registers. For others
    the weight is written in the model's type, for cuBLAS: the weight is then written and read once more, but the GEMM
    takes a third of the time.
    """

    fp8 = False

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, unpacked_from: int) -> None:
        self._weight, self._bias, self._unpacked_from = kernel_weight(weight), bias, unpacked_from
        self._arrived = counters(weight.packed.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= self._unpacked_from:
            return linear(x, unpacked(self._weight, x.dtype), self._bias)
        out = packed_gemm(x, self._weight, arrived=self._arrived)
        return out if self._bias is None else out + self._bias


class TritonOps(LayerOps):
    """The operations of `LayerOps` as Triton kernels on a GPU.

    Attributes:
        unpacked_from: number of tokens from which cuBLAS multiplies by 4-bit and 8-bit weights. By the times measured
            on an H200 and an H100, unpacking pays between 64 and 256 tokens
    """

    unpacked_from = 256

    def packed(self, weight: PackedWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> PackedProjection:
        return PackedProjection(weight, bias, self.unpacked_from)

    def expert_weights(self, weights: Iterable[StoredWeight], count: int, dtype: torch.dtype) -> ExpertWeights:
        made: ExpertWeights = stacked((kernel_weight(w) if isinstance(w, PackedWeight) else w for w in weights), count)
        return made

    def rotation(self, rope: Rope, batch: Batch) -> Rope:
        return rope

    def rope_store(
        self, qkv: torch.Tensor, rotation: Rope, norms: HeadNorms | None, kv: LayerKv, batch: Batch
    ) -> torch.Tensor:
        query_norm, key_norm = norms or (None, None)
        turn = (batch.positions, batch.slots, rotation.cos, rotation.sin, query_norm, key_norm)
        return rope_store(qkv, *turn, self._spec.norm_eps, rotation.interleaved, *kv)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, fp8: bool = False) -> Any:
        rows, scale = add_rms_norm(x, residual, weight, self._spec.norm_eps, fp8)
        return Fp8Rows(rows, scale, x.dtype) if fp8 else rows

    def silu_mul(self, gate_up: torch.Tensor, fp8: bool = False) -> Any:
        rows, scale = silu_mul(gate_up, fp8)
        return Fp8Rows(rows, scale, gate_up.dtype) if fp8 else rows

    def experts(self, x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, routing: Routing) -> torch.Tensor:
        return grouped_mlp(x, gate_up, down, *routing)

    def mask(self, logits: torch.Tensor, samples: torch.Tensor, bits: torch.Tensor) -> None:
        token_mask(logits, samples, bits)

    def sample(self, logits: torch.Tensor, batch: Batch, greedy: bool) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if greedy:
            return argmax(logits, out)
        return draw(logits, batch.temperature, batch.top_k, batch.top_p, batch.uniform, out)
