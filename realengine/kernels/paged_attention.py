"""Attention over a paged KV cache that already has the keys and values of the step's own tokens.

The query heads that share a KV head are packed into one tile, so that its KV is read once (GQA packing). A tile has the
one query token of a decode row, or some query tokens of a prefill row. It attends to the row's KV from the beginning,
so a chunk after cached tokens, a whole prompt and a draft to verify are the same case. KV tiles that lie wholly below
the causal diagonal need no mask (FlashAttention-2, Dao 2023).

On the device, `kv_splits` divides the KV among programs, so that a launch can be replayed with other contents. The part
of a tile that finishes last merges the others. With FIXED_SPLITS a row's result does not depend on the other rows of
the batch.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from tokentwin.realengine.kernels.attention_tile import LOG2_E, LOWEST, attend_tile, load_heads
from tokentwin.realengine.kernels.kv_splits import (
    NO_SPLITS,
    STEP,
    Splits,
    is_last_part,
    merged_parts,
    passed_steps,
    plan_splits,
)
from tokentwin.realengine.kernels.launches import (
    F32,
    I32,
    SHAPES,
    WINDOWED,
    Specialisation,
    compute_dtype,
    dependent_launch,
    shaped,
)

# splits if batch-invariant: one row with 8 KV heads then has 128 programs, about one for each multiprocessor
FIXED_SPLITS = 16
_DECODE_RESIDENT = 4  # decode programs on one multiprocessor; all settings here were measured on an H200
_MERGED = 8192  # number of values that the merge of a decode row loads at once
_MANY_TOKENS = 2048  # a step with more query tokens has large tiles, and runs eagerly


class Tile(NamedTuple):
    """The settings of a prefill's programs.

    Attributes:
        rows: maximum number of query rows of a tile: tokens x query heads of a KV head
        warps: number of warps of a program; a warpgroup of 4 computes 64 rows of a wgmma at once
        stages: number of KV tiles in flight
        resident: number of programs on one multiprocessor
    """

    rows: int
    warps: int
    stages: int
    resident: int


# Drafts and short chunks fill a small tile, and many small tiles fill the GPU. Long prompts read KV less often in large
# tiles. Large tiles spill some registers to memory, but are still faster than tiles that do not.
_SMALL_TILE, _LARGE_TILE = Tile(64, 4, 2, 2), Tile(256, 8, 3, 1)
_LARGE_STACK = 512  # bytes of registers that a thread may spill to memory
_TILES = {tile.rows: tile for tile in (_SMALL_TILE, _LARGE_TILE)}


class PagedRows(NamedTuple):
    """The rows of a step.

    Attributes:
        context: [R] int32, number of KV tokens of each row, including those of this step's queries; at least 1
        query_start: [R] int32, index in the batch of each row's first query token; `query_len` [R] int32, number of its
            query tokens, which are the last tokens of its context
        blocks: int32, block ids of all rows; the ids of row r begin at `table_start[r]` ([R] int32)
    """

    context: Tensor
    query_start: Tensor
    query_len: Tensor
    blocks: Tensor
    table_start: Tensor


@triton.jit
def _attention_part(
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
    TOGETHER: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Compute one item and KV head; the program's number is item x KV_HEADS + KV head. The longest tiles come first."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP if PREFILL else 1
    MEMBERS: tl.constexpr = BLOCK_M if PREFILL else GROUP
    MERGED_ROWS: tl.constexpr = BLOCK_M if PREFILL else triton.next_power_of_2(GROUP)
    STAGES: tl.constexpr = None if PREFILL else 1
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    item = items + tl.program_id(0) // KV_HEADS * 4
    kv_head = tl.program_id(0) % KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
    unit = tl.load(item)
    if unit >= 0:
        part = tl.load(item + 1)
        parts = tl.load(item + 2)
        members = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        row = tl.load(tile_row + unit) if PREFILL else unit
        tokens = tl.load(context + row)
        table = blocks + tl.load(table_start + row)
        if PREFILL:
            length = tl.load(query_len + row)
            index = tl.load(tile_first + unit) + members // GROUP
            token = tl.load(query_start + row) + index
            present = (members < TOKENS * GROUP) & (index < length)
            visible = tokens - length + index + 1
            seen_by_all = tokens - length + tl.load(tile_first + unit) + 1
        else:
            token = row + members * 0
            present = members < GROUP
            visible = tokens + members * 0
            seen_by_all = tokens
        heads = kv_head * GROUP + members % GROUP
        query = load_heads(queries, token, heads, dims, query_stride, present, DIM, COMPUTE)

        last = tl.minimum(tokens, seen_by_all - 1 + TOKENS)  # number of tokens that the last query of the tile sees
        oldest = passed_steps(seen_by_all, WINDOW)
        share = tl.cdiv(tl.cdiv(last - oldest, STEP), parts) * STEP
        begin = oldest + part * share
        end = tl.minimum(last, begin + share)
        whole = end // BLOCK_N * BLOCK_N
        if PREFILL:
            whole = tl.minimum(tl.maximum(seen_by_all // BLOCK_N * BLOCK_N, begin), whole)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        if WINDOW:
            inside = tl.minimum(tl.maximum(tl.cdiv(last - WINDOW, BLOCK_N) * BLOCK_N, begin), whole)
            for first in tl.range(begin, inside, BLOCK_N, num_stages=STAGES):
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
        for first in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, first, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, True, COMPUTE, WINDOW,
            )  # fmt: skip
        seen = tl.where(total > 0, total, 1.0)  # avoid 0 / 0: a part may have no token that the first queries see
        result = weighted * (value_scale / seen)[:, None]
        places = (token.to(tl.int64) * HEADS + heads)[:, None] * DIM + dims[None, :]
        kept = present[:, None] & (dims[None, :] < DIM)
        if parts == 1:
            tl.store(out + places, result.to(out.dtype.element_ty), mask=kept)
        else:
            slot = tl.load(item + 3)
            own = ((slot + part).to(tl.int64) * KV_HEADS + kv_head) * MEMBERS + members
            stored = (members < MEMBERS)[:, None] & (dims[None, :] < DIM)
            tl.store(partial + own[:, None] * DIM + dims[None, :], result, mask=stored)
            tl.store(log_sums + own, highest + tl.log2(total), mask=members < MEMBERS)
            if is_last_part(arrived, slot, parts, kv_head, KV_HEADS):
                merged = merged_parts(
                    partial, log_sums, slot, parts, kv_head, dims, KV_HEADS, MEMBERS, MERGED_ROWS, TOGETHER, DIM
                )
                if PREFILL:
                    tl.store(out + places, merged.to(out.dtype.element_ty), mask=kept)
                else:  # store the real query rows only, because some rows only pad the tile
                    member = tl.arange(0, MERGED_ROWS)
                    at = (row.to(tl.int64) * HEADS + kv_head * GROUP + member)[:, None] * DIM + dims[None, :]
                    there = (member < GROUP)[:, None] & (dims[None, :] < DIM)
                    tl.store(out + at, merged.to(out.dtype.element_ty), mask=there)


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    tiles: tuple[Tensor, Tensor] | None,
    splits: Splits,
    out: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """Write causal attention to `out`, for decode rows or for the query tokens of `tiles`.

    Args:
        queries: [T, H, D] bf16, fp16 or fp32; the stride between tokens may exceed H x D, as in a merged QKV
        keys: [blocks, KV heads, block size, D], in the dtype of `queries` or fp8 e4m3, contiguous; `values` likewise
        tiles: `tile_row` [n] int32 and `tile_first` [n] int32 of `make_tiles`, where row -1 means no tile; None for
            decode rows
        splits: result of `attention_splits`, for these tiles or for decode rows
        out: [T, H, D] contiguous
        scale: factor of the scores, usually D ** -0.5
        k_scale: keys are stored keys times k_scale; `v_scale` likewise
        window: number of tokens that a query sees, up to and including its own; 0 means all. Steps wholly before the
            window are not read

    The token of decode row i is token i. Entries of `out` for other tokens are not written. What a row reads depends
    only on the contents of buffers, so that the launch can be captured in a CUDA graph.
    """
    heads, dim = queries.shape[1:]
    _, kv_heads, page, _ = keys.shape
    group = triton.next_power_of_2(heads // kv_heads)
    wide = queries.dtype == torch.float32
    # converting fp8 needs registers, so KV tiles are narrower
    narrow = wide or (tiles is None and keys.dtype == torch.float8_e4m3fn and dim > 64)
    if tiles is None:
        # Programs of two warps leave room for others on a multiprocessor, and so for more loads in flight. Tensor cores
        # need at least 16 rows.
        block_m, together = max(16, group), max(_MERGED // (group * triton.next_power_of_2(dim)), 1)
        pipeline = {"num_warps": 2, "num_stages": 4 if dim > 64 and keys.itemsize > 1 else 5}
    else:
        tile = _TILES[splits.partial.shape[2]]
        block_m, together, pipeline = tile.rows, 1, {"num_warps": tile.warps, "num_stages": tile.stages}
    _attention_part[(len(splits.items) * kv_heads,)](
        queries, keys, values, *rows, *(tiles or (rows.context, rows.context)), *splits, out,
        scale * k_scale * LOG2_E, v_scale, queries.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, BLOCK_M=block_m, BLOCK_N=32 if narrow else 64,
        TOGETHER=together, COMPUTE=compute_dtype(queries.dtype), WINDOW=window, PREFILL=tiles is not None,
        **dependent_launch(queries.device), **pipeline,
    )  # fmt: skip


def attention_splits(
    context: Tensor,
    query_len: Tensor,
    work: tuple[Tensor, Tensor] | int,
    heads: int,
    kv_heads: int,
    dim: int,
    multiprocessors: int,
    fixed: bool,
    window: int = 0,
    tile: Tile = _SMALL_TILE,
    few_parts: bool = True,
) -> Splits:
    """Divide the KV of tiles or of decode rows into enough parts to fill the GPU's `multiprocessors`.

    Args:
        work: `tile_row` and `tile_first` of `make_tiles`; or a number of rows, of which those with one query token are
            decode rows
        fixed: True to cut every decode row into FIXED_SPLITS parts instead, if it is long enough, and to leave the KV
            of tiles whole
        window: number of tokens that a query sees; 0 means all
        tile: settings that the tiles were made for
        few_parts: False to cut tiles without regard to the time of the merge
    """
    if isinstance(work, int):
        tiles, units, members, tokens = None, work, heads // kv_heads, 1
        resident, fixed_splits = _DECODE_RESIDENT, FIXED_SPLITS
    else:
        tiles, units, members, tokens = work, len(work[0]), tile.rows, tile_tokens(tile, heads, kv_heads)
        resident, fixed_splits = tile.resident, 1
    programs = max(1, resident * multiprocessors // kv_heads)
    most = fixed_splits if fixed else 0
    return plan_splits(
        context, query_len, tiles, units, kv_heads, members, dim, programs, most, tokens, window,
        few_parts and tiles is not None,
    )  # fmt: skip


def tile_for(tokens: int, fixed: bool) -> Tile:
    """Return the tile for a step with `tokens` tokens in prefill rows; if `fixed`, it does not depend on `tokens`."""
    return _LARGE_TILE if tokens > _MANY_TOKENS and not fixed else _SMALL_TILE


def tile_tokens(tile: Tile, heads: int, kv_heads: int) -> int:
    """Return the number of query tokens of a tile: its rows divided by the number of query heads of a KV head."""
    return tile.rows // (heads // kv_heads)


def make_tiles(rows: list[tuple[int, int, int]], tokens_per_tile: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the row of each tile, and the index of its first token among the row's query tokens.

    Args:
        rows: (row, number of query tokens, number of KV tokens including these) of each prefill row
        tokens_per_tile: result of `tile_tokens`

    Tiles are in descending order of the number of KV tokens that they read. Programs start in that order, and if a long
    program started last, the rest of the GPU would wait for it (Graham 1969). Equal tiles keep the order of `rows`.
    """
    tiles = [
        (-min(context, context - length + first + tokens_per_tile), row, first)
        for row, length, context in rows
        for first in range(0, length, tokens_per_tile)
    ]
    tiles.sort(key=lambda tile: tile[0])
    table = np.array(tiles, np.int32).reshape(-1, 3)
    return table[:, 1].copy(), table[:, 2].copy()


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels for every shape."""
    row = shaped(1, dtype=I32)
    # Several programs of a decode, or of small tiles, share a multiprocessor, which has 65,536 registers.
    kinds: list[tuple[str, Tile | None, int, str]] = [("paged_decode", None, 255, "mma.sync")]
    kinds += [
        (name, tile, min(255, 65536 // (tile.resident * tile.warps * 32)), "wgmma")
        for name, tile in (("paged_prefill", _SMALL_TILE), ("long_prefill", _LARGE_TILE))
    ]
    for kind, tile, ceiling, product in kinds:
        for shape in (*SHAPES, WINDOWED):
            queries = shaped(1, shape.heads, shape.dim, dtype=shape.dtype)
            cache = shaped(1, shape.kv_heads, shape.page, shape.dim, dtype=shape.cached)
            splits = NO_SPLITS._replace(partial=shaped(1, 1, tile.rows if tile else 1, 1, dtype=F32))
            about = (queries, cache, cache, PagedRows(*[row] * 5), tile and (row, row), splits, queries, 0.1)
            launch = partial(paged_attention, *about, window=shape.window)
            expects = ("cp.async", product, "atom", "griddepcontrol")
            stack = _LARGE_STACK if tile is _LARGE_TILE else 0
            yield Specialisation(f"{kind} {shape.name}", _attention_part, launch, ceiling, expects, stack_ceiling=stack)
