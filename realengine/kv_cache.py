"""The paged KV cache: one tensor of fixed-size blocks for all layers, addressed by the scheduler's block ids.

A token's *slot* is `block * block_size + offset`. Block 0 is the null block: padding rows read and write it. The tokens
of one head lie side by side within a block, because that is what attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from serving.deployments.model_spec import ModelSpec

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class LayerKv(NamedTuple):
    """One layer's keys and values, each `[blocks, kv_heads, block_size, head_dim]`, divided by their scales."""

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class KvCache:
    """Keys and values of every layer. `dtype` may be `torch.float8_e4m3fn`, whose range is enough without scales.

    scales  of each layer's keys and values, where a checkpoint has them; None: all are 1
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._scales = scales or [(1.0, 1.0)] * spec.num_layers

    def layer(self, index: int) -> LayerKv:
        keys, values = self._tensor[index]
        return LayerKv(keys, values, *self._scales[index])


def write(kv: LayerKv, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store `keys` and `values` `[tokens, kv_heads, head_dim]` at `slots` `[tokens]`, in the cache's dtype.

    In FP8 what lies beyond its range is stored as its largest number, where torch alone would make it NaN.
    """
    block_size = kv.keys.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    if kv.keys.dtype == FP8:
        scaled = (keys / kv.k_scale, values / kv.v_scale)
        keys, values = (x.clamp(-_LARGEST, _LARGEST) for x in scaled)
    kv.keys[blocks, :, offsets] = keys.to(kv.keys.dtype)
    kv.values[blocks, :, offsets] = values.to(kv.values.dtype)


def read(kv: LayerKv, blocks: torch.Tensor, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `tokens` keys and values held in `blocks`, each `[kv_heads, tokens, head_dim]`."""
    keys, values = (t.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :tokens].to(dtype) for t in kv[:2])
    return (keys, values) if kv.k_scale == kv.v_scale == 1.0 else (keys * kv.k_scale, values * kv.v_scale)
