"""Attention over the paged KV cache, behind one small interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from realengine.batch import Batch
from realengine.kv_cache import KvCache
from serving.errors import UserError


class Attention(Protocol):
    """A backend. This step's keys and values have been written before it is asked."""

    name: str

    def attend(self, layer: int, queries: torch.Tensor, batch: Batch, kv: KvCache) -> torch.Tensor:
        """Causal attention of `queries` `[T, heads, head_dim]` over each row's own context; same shape out."""
        ...


class TorchAttention:
    """The reference: row by row, on any device torch knows.

    The query heads of a KV head are folded into query rows (GQA packing), so keys and values are never
    repeated. A row costs a constant plus its context; padding to the longest context would make a step's
    time depend on imbalance, which no cost model could see.
    """

    name = "torch"

    def attend(self, layer: int, queries: torch.Tensor, batch: Batch, kv: KvCache) -> torch.Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = kv.keys.shape[3]
        group = heads // kv_heads
        out = torch.empty_like(queries)
        for first, count, context, blocks, mask in batch.spans:
            keys, values = kv.read(layer, blocks, context)
            rows = queries[first : first + count].view(count, kv_heads, group, dim)
            packed = rows.permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, dim)
            attended = scaled_dot_product_attention(
                packed,
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=None if mask is None else mask.repeat(group, 1),
            )
            rows = attended.view(kv_heads, group, count, dim).permute(2, 0, 1, 3)
            out[first : first + count] = rows.reshape(count, heads, dim)
        return out


BACKENDS = {"torch": TorchAttention}


def find_attention(name: str) -> Attention:
    """The backend called `name`."""
    if name not in BACKENDS:
        raise UserError("attention", name, f"is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]()
