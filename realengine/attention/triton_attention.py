"""Attention through our Triton kernels, and a hybrid that gives long prefills to torch's kernel.

Each layer has a decode launch over the step's one-token rows and a prefill launch over the tiles of the other rows.
Once a step, for each of the two kinds of launch, the device decides how programs share the KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from tokentwin.realengine.attention.kv_cache import LayerKv, read
from tokentwin.realengine.devices.device import Device
from tokentwin.realengine.kernels.kv_splits import Splits
from tokentwin.realengine.kernels.launches import INTERPRETING
from tokentwin.realengine.kernels.paged_attention import (
    PagedRows,
    Tile,
    attention_splits,
    make_tiles,
    paged_attention,
    tile_for,
    tile_tokens,
)
from tokentwin.realengine.step_input import Batch, Ints
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_WIDEST_HEAD = 128  # dimensions: the kernels' tiles are made for heads of up to this size
_FRESH_TOKENS = 512  # length from which the hybrid sends prompts without cached tokens to torch


class _Fresh(NamedTuple):
    """A whole prompt: the slice of its tokens in the batch, and the ids of its blocks."""

    tokens: slice
    blocks: torch.Tensor


class _Plan(NamedTuple):
    """The plan of a step.

    `fresh` are the prompts for torch's attention. `out` is empty until the first layer. In a step with tiles, every
    layer then writes to the one tensor in it. The output of tokens that are in no row is zero, because NaN would spread
    in later operations.
    """

    batch: Batch
    decode: Splits | None
    prefill: Splits | None
    fresh: list[_Fresh]
    out: list[torch.Tensor]
    window: int


class TritonAttention:
    """Attention by our kernels.

    `batch_invariant` fixes the splits, so that a row's result never depends on the other rows of the step.

    Attributes:
        few_parts: as in `attention_splits`
    """

    name = "triton"
    few_parts = True
    capturable: Literal["never", "decode", "always"] = "always"

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        if deployment.device == "cpu" and not INTERPRETING:
            raise UserError("attention", self.name, "needs device cuda; use torch on the CPU")
        if spec.head_dim > _WIDEST_HEAD:
            remedy = f"takes heads of at most {_WIDEST_HEAD} dimensions, but {spec.name}'s have {spec.head_dim}"
            raise UserError("attention", self.name, f"{remedy}; use torch")
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._block_size = deployment.scheduler.block_size
        self._filling = (device.multiprocessors, deployment.batch_invariant)
        self._scale = spec.head_dim**-0.5

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        return self._tiles(rows, self._tile(sum(tokens for _, tokens, _ in rows)))

    def _tiles(self, rows: Sequence[tuple[int, int, int]], tile: Tile) -> tuple[Ints, Ints]:
        return make_tiles(list(rows), tile_tokens(tile, *self._heads[:2]))

    def _tile(self, tokens: int) -> Tile:
        return tile_for(tokens, fixed=self._filling[1])

    def prepare(self, batch: Batch, captured: bool) -> None:
        pass

    def plan(self, batch: Batch, window: int = 0) -> _Plan:
        rows, tiles = batch.layout.decode_rows, (batch.tile_row, batch.tile_first)
        sizes = (*self._heads, *self._filling)
        tile = self._tile(batch.layout.tokens - rows)
        return _Plan(
            batch,
            attention_splits(batch.context, batch.query_len, rows, *sizes, window) if rows else None,
            attention_splits(batch.context, batch.query_len, tiles, *sizes, window, tile, self.few_parts)
            if batch.layout.tiles
            else None,
            [],
            [],
            window,
        )

    def attend(self, queries: torch.Tensor, plan: _Plan, kv: LayerKv) -> torch.Tensor:
        batch, decode, prefill, fresh, _, window = plan
        rows = PagedRows(batch.context, batch.query_start, batch.query_len, batch.blocks, batch.table_start)
        out = self._out(queries, plan)
        for tiles, splits in ((None, decode), ((batch.tile_row, batch.tile_first), prefill)):
            if splits:
                how = (self._scale, *kv[2:], window)
                paged_attention(queries, kv.keys, kv.values, rows, tiles, splits, out, *how)
        for tokens, block_ids in fresh:
            count = tokens.stop - tokens.start
            keys, values = read(kv, block_ids, 0, count, queries.dtype)
            heads_first = queries[None, tokens].transpose(1, 2)
            attended = scaled_dot_product_attention(
                heads_first, keys[None], values[None], is_causal=True, enable_gqa=True
            )
            out[tokens] = attended[0].transpose(0, 1)
        return out

    def _out(self, queries: torch.Tensor, plan: _Plan) -> torch.Tensor:
        if plan.batch.layout.decodes_only:
            return torch.empty_like(queries, memory_format=torch.contiguous_format)
        if not plan.out:
            plan.out.append(torch.zeros_like(queries, memory_format=torch.contiguous_format))
        return plan.out[0]


class HybridAttention(TritonAttention):
    """Our kernels for decode rows and for chunks after cached tokens, and torch's for whole long prompts.

    For such prompts torch has a kernel from the hardware's vendor. The host chooses by length alone.
    """

    name = "hybrid"
    capturable = "decode"

    def __init__(self, spec: ModelSpec, deployment: Deployment, device: Device) -> None:
        if deployment.batch_invariant:
            raise UserError("batch_invariant", True, "needs attention triton or torch, not hybrid")
        super().__init__(spec, deployment, device)
        self._window = spec.sliding_window

    def tiles(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Ints, Ints]:
        tile = self._tile(sum(tokens for _, tokens, _ in rows))
        return self._tiles([row for row in rows if not self._is_fresh(row[1], row[2])], tile)

    def plan(self, batch: Batch, window: int = 0) -> _Plan:
        plan = super().plan(batch, window)
        if batch.layout.tokens < _FRESH_TOKENS:
            return plan
        fields = (batch.on_host(name) for name in ("query_start", "query_len", "context", "table_start"))
        return plan._replace(
            fresh=[
                _Fresh(slice(first, first + count), batch.blocks[start : start - (-context // self._block_size)])
                for first, count, context, start in zip(*fields, strict=True)
                if self._is_fresh(count, context)
            ]
        )

    def _is_fresh(self, tokens: int, context: int) -> bool:
        """Return whether the row is a whole long prompt, no longer than the sliding window."""
        return tokens == context and _FRESH_TOKENS <= tokens <= (self._window or tokens)
