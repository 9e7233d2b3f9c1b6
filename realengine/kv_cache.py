"""The paged KV cache: one tensor of fixed-size blocks for all layers, addressed by the scheduler's block ids.

A token's *slot* is `block * block_size + offset`. Block 0 is the null block: padding rows read and write it.
"""

from __future__ import annotations

import torch

from serving.model_spec import ModelSpec


class KvCache:
    """Keys and values, each `[layers, blocks, block_size, kv_heads, head_dim]`."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.block_size = block_size
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store `keys` and `values` `[tokens, kv_heads, head_dim]` at `slots` `[tokens]`."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `tokens` keys and values held in `blocks`, each `[tokens, kv_heads, head_dim]`."""
        keys = self.keys[layer].index_select(0, blocks).flatten(0, 1)[:tokens]
        values = self.values[layer].index_select(0, blocks).flatten(0, 1)[:tokens]
        return keys, values
