"""Attention of prefill rows, causal, over a paged KV cache that already holds their tokens' keys and values.

Work comes as tiles, each some query tokens of a row, and a program takes a tile for one KV head: all the query heads
of its group for each token (GQA packing), against the row's KV from its beginning, so that a chunk over past KV, a
whole prompt and a draft to verify are one case. Where tiles do not fill the GPU their KV is divided among programs by
`kv_splits`. KV tiles wholly below the causal diagonal are not masked (FlashAttention-2, Dao 2023).
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from realengine.kernels.attention_shapes import SHAPES, TRITON_NAME, WINDOWED
from realengine.kernels.attention_tile import LOG2_E, LOWEST, attend_tile, load_heads
from realengine.kernels.dependent_launch import dependent_launch
from realengine.kernels.interpreting import compute_dtype
from realengine.kernels.kv_splits import (
    SPLITS_SIGNATURE,
    STEP,
    Splits,
    is_last_part,
    merged_parts,
    passed_steps,
    plan_splits,
)

if TYPE_CHECKING:
    from realengine.kernels.aot import Specialisation

_TILE_ROWS = 128  # query rows of a tile: tokens x heads of a group; two warpgroups' worth of wgmma


@triton.jit
def _prefill_part(
    queries,
    keys,
    values,
    context,
    query_start,
    query_len,
    blocks,
    table_start,
    tile_row,
    tile_first,
    items,
    arrived,
    partial,
    log_sums,
    out,
    scale_log2,
    value_scale,
    query_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program item x KV_HEADS + KV head, so that programs start in the order of the tiles, the longest first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    item = items + tl.program_id(0) // KV_HEADS * 4
    kv_head = tl.program_id(0) % KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.load(item)
    if tile >= 0:
        part = tl.load(item + 1)
        parts = tl.load(item + 2)
        row = tl.load(tile_row + tile)
        start = tl.load(tile_first + tile)
        length = tl.load(query_len + row)
        tokens = tl.load(context + row)
        table = blocks + tl.load(table_start + row)

        members = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        index = start + members // GROUP
        present = (members < TOKENS * GROUP) & (index < length)
        heads = kv_head * GROUP + members % GROUP
        token = tl.load(query_start + row) + index
        query = load_heads(queries, token, heads, dims, query_stride, present, DIM, COMPUTE)

        past = tokens - length
        visible = past + index + 1
        seen_by_all = past + start + 1
        end = tl.minimum(tokens, past + start + TOKENS)
        last = end  # of the tile's queries sees up to here
        oldest = passed_steps(seen_by_all, WINDOW)
        share = tl.cdiv(tl.cdiv(end - oldest, STEP), parts) * STEP
        begin = oldest + part * share
        end = tl.minimum(end, begin + share)
        whole = tl.minimum(tl.maximum(seen_by_all // BLOCK_N * BLOCK_N, begin), end // BLOCK_N * BLOCK_N)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        if WINDOW:
            inside = tl.minimum(tl.maximum(tl.cdiv(last - WINDOW, BLOCK_N) * BLOCK_N, begin), whole)
            for first in tl.range(begin, inside, BLOCK_N):
                weighted, total, highest = attend_tile(
                    query, weighted, total, highest, keys, values, table, first, visible, tokens, kv_head, dims,
                    scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, True, COMPUTE, WINDOW,
                )  # fmt: skip
            begin = inside
        for first in tl.range(begin, whole, BLOCK_N):
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, first, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, False, COMPUTE,
            )  # fmt: skip
        for first in tl.range(whole, end, BLOCK_N):
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, first, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, True, COMPUTE, WINDOW,
            )  # fmt: skip
        seen = tl.where(total > 0, total, 1.0)  # a part may lie beyond what the first tokens see
        result = weighted * (value_scale / seen)[:, None]
        places = (token.to(tl.int64) * HEADS + heads)[:, None] * DIM + dims[None, :]
        kept = present[:, None] & (dims[None, :] < DIM)
        if parts == 1:
            tl.store(out + places, result.to(out.dtype.element_ty), mask=kept)
        else:
            slot = tl.load(item + 3)
            own = ((slot + part).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + members
            tl.store(partial + own[:, None] * DIM + dims[None, :], result, mask=dims[None, :] < DIM)
            tl.store(log_sums + own, highest + tl.log2(total))
            if is_last_part(arrived, slot, parts, kv_head, KV_HEADS):
                merged = merged_parts(partial, log_sums, slot, parts, kv_head, dims, KV_HEADS, BLOCK_M, BLOCK_M, 1, DIM)
                tl.store(out + places, merged.to(out.dtype.element_ty), mask=kept)


def paged_prefill(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context: Tensor,
    query_start: Tensor,
    query_len: Tensor,
    blocks: Tensor,
    table_start: Tensor,
    tile_row: Tensor,
    tile_first: Tensor,
    splits: Splits,
    out: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """Write causal attention of the tiles' query tokens to `out`, whose other tokens are left alone.

    queries      [T, H, D] bf16, fp16 or fp32; tokens may lie further apart than H x D, as in a merged QKV
    keys         [blocks, KV heads, block size, D], as `queries` or fp8 e4m3, contiguous; `values` likewise
    context      [R] int32, KV tokens of each row, these queries' own included
    query_start  [R] int32, each row's first token in the batch; `query_len` [R] int32, its tokens, the last of context
    blocks       int32, block ids of all rows; those of row r begin at `table_start[r]` ([R] int32)
    tile_row     [n] int32 of `make_tiles`, with `tile_first`; -1 is no tile
    splits       of `prefill_splits` for these tiles
    out          [T, H, D] contiguous
    scale        of the scores, D ** -0.5 as a rule
    k_scale      what stored keys are multiplied by to give keys; `v_scale` likewise
    window       tokens that a query sees, its own the last; 0 is all. Steps wholly before it are not read
    """
    heads, dim = queries.shape[1:]
    _, kv_heads, page, _ = keys.shape
    _prefill_part[(len(splits.items) * kv_heads,)](
        queries, keys, values, context, query_start, query_len, blocks, table_start, tile_row, tile_first, *splits, out,
        scale * k_scale * LOG2_E, v_scale, queries.stride(0),
        **_compiled_in(heads, kv_heads, dim, page, queries.dtype, window), **dependent_launch(queries.device),
    )  # fmt: skip


def prefill_splits(
    context: Tensor,
    query_len: Tensor,
    tile_row: Tensor,
    tile_first: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    multiprocessors: int,
    fixed: bool,
    window: int = 0,
) -> Splits:
    """Divide the KV of tiles as far as it takes to fill the GPU's `multiprocessors`; with `fixed` leave it whole."""
    programs = max(1, multiprocessors // kv_heads)
    return plan_splits(
        context, query_len, (tile_row, tile_first), len(tile_row), kv_heads, _TILE_ROWS, dim, programs,
        1 if fixed else 0, tile_tokens(heads, kv_heads), window,
    )  # fmt: skip


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Query tokens of a tile: as many as its rows hold with all the query heads of a KV head."""
    return _TILE_ROWS // (heads // kv_heads)


def make_tiles(rows: list[tuple[int, int, int]], tokens_per_tile: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The row of each tile, and its first token's index among the row's query tokens.

    rows             (row, query tokens, KV tokens with those) of each prefill row
    tokens_per_tile  of `tile_tokens`

    Tiles are ordered by the KV tokens that they read, the most first, as programs start in that order and a long one
    started last would keep the rest of the GPU waiting (Graham 1969). Equal ones keep the order of `rows`.
    """
    tiles = [
        (-min(context, context - length + first + tokens_per_tile), row, first)
        for row, length, context in rows
        for first in range(0, length, tokens_per_tile)
    ]
    tiles.sort(key=lambda tile: tile[0])
    table = np.array(tiles, np.int32).reshape(-1, 3)
    return table[:, 1].copy(), table[:, 2].copy()


def _compiled_in(heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, window: int) -> dict[str, Any]:
    """All of a launch that is compiled into its kernel."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE": page,
        "BLOCK_M": _TILE_ROWS,
        "BLOCK_N": 32 if dtype == torch.float32 else 64,  # more would spill registers at dim 128
        "COMPUTE": compute_dtype(dtype),
        "WINDOW": window,
        "num_warps": 8,
        "num_stages": 3,
    }


def specialisations() -> list["Specialisation"]:
    """How `paged_prefill` launches its kernel for every shape."""
    from realengine.kernels.aot import Specialisation

    found = []
    for shape in (*SHAPES, WINDOWED):
        constexprs = _compiled_in(shape.heads, shape.kv_heads, shape.dim, shape.page, shape.dtype, shape.window)
        constexprs["PDL"] = True
        stored, cached = "*" + TRITON_NAME[shape.dtype], "*" + TRITON_NAME[shape.cached]
        found.append(
            Specialisation(
                name=f"paged_prefill {shape.name}",
                kernel=_prefill_part,
                signature={
                    "queries": stored,
                    "keys": cached,
                    "values": cached,
                    "context": "*i32",
                    "query_start": "*i32",
                    "query_len": "*i32",
                    "blocks": "*i32",
                    "table_start": "*i32",
                    "tile_row": "*i32",
                    "tile_first": "*i32",
                    **SPLITS_SIGNATURE,
                    "out": stored,
                    "scale_log2": "fp32",
                    "value_scale": "fp32",
                    "query_stride": "i32",
                },
                num_warps=constexprs.pop("num_warps"),
                num_stages=constexprs.pop("num_stages"),
                constexprs=constexprs,
                register_ceiling=255,  # with 8 warps one program stays on a multiprocessor, whatever it has up to there
                expects=("cp.async", "wgmma", "atom", "griddepcontrol"),
            )
        )
    return found
