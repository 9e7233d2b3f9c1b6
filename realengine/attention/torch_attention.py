"""Attention in torch: a reference that works row by row, and a baseline that keeps all scores in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tokentwin.realengine.attention.kv_cache import LayerKv, read
from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.step_input import Batch, Ints
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec


class Span(NamedTuple):
    """The tokens of one row, and the KV that they attend to.

    The KV is that of the `seen` tokens after the first `skipped` tokens in `blocks`.
    """

    first: int
    tokens: int
    skipped: int
    seen: int
    blocks: torch.Tensor
    mask: torch.Tensor | None  # [tokens, seen], True where a query may look; None for a single token


class TorchAttention:
    """The reference: attention row by row, on any device that torch knows.

    The query heads of a KV head are folded into query rows (GQA packing), so keys and values are never repeated. The
    time of a row is a constant plus a part that grows with its context. Padding all rows to the longest context would
    make a step's time depend on how unequal the contexts are, which no cost model could see.
    """

    name = "torch"
    capturable: Literal["never", "decode", "always"] = "never"  # the backend reads lengths on the host

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        self._block_size = deployment.scheduler.block_size

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        none = np.zeros(0, dtype=np.int32)
        return none, none

    def prepare(self, batch: Batch, captured: bool) -> None:
        pass

    def plan(self, batch: Batch, window: int = 0) -> list[Span]:
        fields = (batch.on_host(name) for name in ("query_start", "query_len", "context", "table_start"))
        spans = []
        for first, count, context, start in zip(*fields, strict=True):
            if count == 0:
                continue
            oldest = max(context - count - window + 1, 0) if window else 0
            passed, skipped = divmod(oldest, self._block_size)
            blocks = batch.blocks[start + passed : start - (-context // self._block_size)]
            seen, mask = context - oldest, None
            if count > 1:
                mask = torch.ones(count, seen, dtype=torch.bool, device=blocks.device).tril(seen - count)
                if window:
                    mask = mask.triu(seen - count - window + 1)
            spans.append(Span(first, count, skipped, seen, blocks, mask))
        return spans

    def attend(self, queries: torch.Tensor, plan: list[Span], kv: LayerKv) -> torch.Tensor:
        heads, dim = queries.shape[1:]
        kv_heads = kv.keys.shape[1]
        group = heads // kv_heads
        out = torch.zeros_like(queries)  # tokens that belong to no row stay zero
        for first, count, skipped, seen, blocks, mask in plan:
            keys, values = read(kv, blocks, skipped, seen, queries.dtype)
            rows = queries[first : first + count].view(count, kv_heads, group, dim)
            packed = rows.permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, dim)
            attended = self._product(packed, keys[None], values[None], None if mask is None else mask.repeat(group, 1))
            rows = attended.view(kv_heads, group, count, dim).permute(2, 0, 1, 3)
            out[first : first + count] = rows.reshape(count, heads, dim)
        return out

    def _product(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return attention of `queries` `[1, kv_heads, Q, head_dim]` over `[1, kv_heads, seen, head_dim]`.

        It works tile by tile, so the whole score matrix is never in memory. `mask` is `[Q, seen]`.
        """
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class UnfusedAttention(TorchAttention):
    """Attention with all scores in memory: two matrix products and a softmax between them, as before FlashAttention.

    A row of n tokens over a context of c tokens needs memory for 2 n c scores for each head, in the model's data type.
    """

    name = "unfused"

    def _product(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ values
