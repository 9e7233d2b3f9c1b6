"""The small operations through our Triton kernels: each is one launch, and the device never waits for the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import linear

from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.kernels.grouped_gemm import ExpertWeights, grouped_mlp
from tokentwin.realengine.kernels.packed_gemm import counters, kernel_weight, packed_gemm, unpacked
from tokentwin.realengine.kernels.rope_store import rope_store
from tokentwin.realengine.kernels.router import Rules, route
from tokentwin.realengine.kernels.row_operations import add_rms_norm, silu_mul
from tokentwin.realengine.kernels.sampling import argmax, draw, token_mask
from tokentwin.realengine.models.layer_ops import HeadNorms, LayerOps, Rope, Routing, Scores
from tokentwin.realengine.models.linear import Fp8Rows, PackedWeight, StoredWeight, stacked
from tokentwin.realengine.step_input import Batch


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
            on an H200 and an H100, unpacking begins to pay between 64 and 256 tokens
        grouped_from: number of tokens for each expert from which torch's grouped GEMM computes experts in 16 bits;
            None: never. No GPU has timed it yet. Off Hopper and Blackwell it waits for the device, so only the GPU
            suite sets this
    """

    unpacked_from = 256
    grouped_from: int | None = None

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

    def route(self, scores: Scores) -> tuple[torch.Tensor, Routing]:
        spec = self._spec
        if spec.expert_groups:  # no model that runs on GPUs so far has them
            return super().route(scores)
        rules = Rules(spec.experts_per_token, spec.norm_topk_prob, spec.routed_scaling_factor)
        chosen, shares, choices, offsets = route(scores.logits, scores.bias, rules, scores.own)
        return chosen, Routing(choices, offsets, shares)

    def experts(self, x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, routing: Routing) -> torch.Tensor:
        if self._by_library(x, gate_up, down, routing):
            return self._experts_by_library(x, gate_up, down, routing)
        return grouped_mlp(x, gate_up, down, *routing)

    def _by_library(self, x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, routing: Routing) -> bool:
        """Return whether torch's grouped GEMM computes these: all of the experts, in bf16, rows of whole 16 bytes."""
        if self.grouped_from is None or len(routing.choices) < self.grouped_from * (len(routing.offsets) - 1):
            return False
        weights = [weight for weight in (gate_up, down) if isinstance(weight, torch.Tensor)]
        aligned = all(weight.shape[2] % 8 == 0 for weight in weights)
        whole = len(routing.offsets) - 1 == self._spec.num_experts
        return len(weights) == 2 and x.dtype == torch.bfloat16 and aligned and whole

    def _experts_by_library(self, x: torch.Tensor, gate_up: Any, down: Any, routing: Routing) -> torch.Tensor:
        """Return the same as `experts`, by two of torch's grouped GEMMs."""
        grouped_mm = torch.nn.functional.grouped_mm  # from torch 2.10 on
        (tokens, hidden), topk, ends = x.shape, routing.shares.shape[1], routing.offsets[1:]
        wide = grouped_mm(x[routing.choices // topk], gate_up.transpose(1, 2), offs=ends)
        answers = grouped_mm(self.silu_mul(wide), down.transpose(1, 2), offs=ends)
        answers *= routing.shares.flatten()[routing.choices, None]
        out = x.new_empty(tokens * topk, hidden)
        out[routing.choices] = answers
        return out.view(tokens, topk, hidden).sum(1)

    def mask(self, logits: torch.Tensor, samples: torch.Tensor, bits: torch.Tensor) -> None:
        token_mask(logits, samples, bits)

    def sample(self, logits: torch.Tensor, batch: Batch, greedy: bool) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if greedy:
            return argmax(logits, out)
        return draw(logits, batch.temperature, batch.top_k, batch.top_p, batch.uniform, out)
