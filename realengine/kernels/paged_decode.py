"""Attention of decode rows, one query token each, over a paged KV cache.

The query heads that share a KV head are packed into one tile, so that its KV is read once (GQA packing). A row's KV is
divided among programs by `kv_splits`, on the device, so that a launch can be replayed with other contents; the last
part of a row merges the others. At FIXED_SPLITS a row's result does not depend on the batch that it is in.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
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

FIXED_SPLITS = 16  # of the batch-invariant mode: enough for one row of 8 KV heads to reach a program per multiprocessor
_RESIDENT_PROGRAMS = 3  # on one multiprocessor, by the registers and shared memory of `specialisations`
_MERGED = 8192  # numbers that a merge loads at once


@triton.jit
def _decode_part(
    queries,
    keys,
    values,
    context,
    blocks,
    table_start,
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
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program item x KV_HEADS + KV head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    GROUP_ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_M: tl.constexpr = max(16, GROUP_ROWS)  # 16 rows: the least that tensor cores take
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    item = items + tl.program_id(0) // KV_HEADS * 4
    kv_head = tl.program_id(0) % KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(item)
    if row >= 0:
        part = tl.load(item + 1)
        parts = tl.load(item + 2)
        tokens = tl.load(context + row)
        table = blocks + tl.load(table_start + row)
        oldest = passed_steps(tokens, WINDOW)
        length = tl.cdiv(tl.cdiv(tokens - oldest, STEP), parts) * STEP
        begin = oldest + part * length
        end = tl.minimum(tokens, begin + length)
        whole = begin + (end - begin) // BLOCK_N * BLOCK_N

        members = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        present = members < GROUP
        heads = kv_head * GROUP + members
        query = load_heads(queries, row + members * 0, heads, dims, query_stride, present, DIM, COMPUTE)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], LOWEST, tl.float32)
        visible = tokens + members * 0
        if WINDOW:
            inside = tl.minimum(tl.maximum(tl.cdiv(tokens - WINDOW, BLOCK_N) * BLOCK_N, begin), whole)
            for first in tl.range(begin, inside, BLOCK_N, num_stages=1):
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
        if whole < end:
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, whole, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, True, COMPUTE, WINDOW,
            )  # fmt: skip
        result = weighted * (value_scale / total)[:, None]
        kept = present[:, None] & (dims[None, :] < DIM)
        if parts == 1:
            places = row.to(tl.int64) * HEADS + heads
            tl.store(out + places[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=kept)
        else:
            slot = tl.load(item + 3)
            places = ((slot + part).to(tl.int64) * KV_HEADS + kv_head) * GROUP + members
            tl.store(partial + places[:, None] * DIM + dims[None, :], result, mask=kept)
            tl.store(log_sums + places, highest + tl.log2(total), mask=present)
            if is_last_part(arrived, slot, parts, kv_head, KV_HEADS):
                merged = merged_parts(
                    partial, log_sums, slot, parts, kv_head, dims, KV_HEADS, GROUP, GROUP_ROWS, TOGETHER, DIM
                )
                member = tl.arange(0, GROUP_ROWS)
                merged_places = (row.to(tl.int64) * HEADS + kv_head * GROUP + member)[:, None] * DIM + dims[None, :]
                merged_kept = (member < GROUP)[:, None] & (dims[None, :] < DIM)
                tl.store(out + merged_places, merged.to(out.dtype.element_ty), mask=merged_kept)


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context: Tensor,
    blocks: Tensor,
    table_start: Tensor,
    splits: Splits,
    out: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """Write attention of the rows that `splits` names to `out`; token i is that of row i.

    queries      [T, H, D] bf16, fp16 or fp32; tokens may lie further apart than H x D, as in a merged QKV
    keys         [blocks, KV heads, block size, D], as `queries` or fp8 e4m3, contiguous; `values` likewise
    context      [R] int32, KV tokens of each row, at least 1
    blocks       int32, block ids of all rows; those of row r begin at `table_start[r]` ([R] int32)
    splits       of `decode_splits`
    out          [T, H, D] contiguous
    scale        of the scores, D ** -0.5 as a rule
    k_scale      what stored keys are multiplied by to give keys; `v_scale` likewise
    window       tokens that a query sees, its own the last; 0 is all. Steps wholly before it are not read

    Only buffers' contents decide what a row reads, so that the launch can be captured in a CUDA graph.
    """
    heads, dim = queries.shape[1:]
    _, kv_heads, page, _ = keys.shape
    _decode_part[(len(splits.items) * kv_heads,)](
        queries, keys, values, context, blocks, table_start, *splits, out,
        scale * k_scale * LOG2_E, v_scale, queries.stride(0),
        **_compiled_in(heads, kv_heads, dim, page, queries.dtype, keys.dtype, window),
        **dependent_launch(queries.device),
    )  # fmt: skip


def decode_splits(
    context: Tensor,
    query_len: Tensor,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    multiprocessors: int,
    fixed: bool,
    window: int = 0,
) -> Splits:
    """Divide the KV of those of the first `rows` rows that have one query token.

    multiprocessors  of the GPU, which are to be filled
    fixed            cut every row into FIXED_SPLITS instead, as far as it is long enough
    window           tokens that a query sees; 0 is all
    """
    programs = max(1, _RESIDENT_PROGRAMS * multiprocessors // kv_heads)
    most = FIXED_SPLITS if fixed else 0
    return plan_splits(context, query_len, None, rows, kv_heads, heads // kv_heads, dim, programs, most, 1, window)


def _compiled_in(
    heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, cached: torch.dtype, window: int
) -> dict[str, Any]:
    """All of a launch that is compiled into its kernel.

    Tile and pipeline keep some 64 KB of loads in flight on a multiprocessor, twice what latency x bandwidth asks for
    (Little's law). Tiles that are converted, from fp8 or for three TF32 products, are narrower for want of registers.
    """
    narrow = dtype == torch.float32 or (cached == torch.float8_e4m3fn and dim > 64)
    group = triton.next_power_of_2(heads // kv_heads) * triton.next_power_of_2(dim)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE": page,
        "BLOCK_N": 32 if narrow else 64,
        "TOGETHER": max(_MERGED // group, 1),
        "COMPUTE": compute_dtype(dtype),
        "WINDOW": window,
        "num_warps": 4,
        "num_stages": 5 if dim > 64 and cached.itemsize > 1 else 7,
    }


def specialisations() -> list["Specialisation"]:
    """How `paged_decode` launches its kernel for every shape."""
    from realengine.kernels.aot import Specialisation

    found = []
    for shape in (*SHAPES, WINDOWED):
        constexprs = _compiled_in(*shape[1:4], shape.page, shape.dtype, shape.cached, shape.window)
        constexprs["PDL"] = True
        stored, cached = "*" + TRITON_NAME[shape.dtype], "*" + TRITON_NAME[shape.cached]
        found.append(
            Specialisation(
                name=f"paged_decode {shape.name}",
                kernel=_decode_part,
                signature={
                    "queries": stored,
                    "keys": cached,
                    "values": cached,
                    "context": "*i32",
                    "blocks": "*i32",
                    "table_start": "*i32",
                    **SPLITS_SIGNATURE,
                    "out": stored,
                    "scale_log2": "fp32",
                    "value_scale": "fp32",
                    "query_stride": "i32",
                },
                num_warps=constexprs.pop("num_warps"),
                num_stages=constexprs.pop("num_stages"),
                constexprs=constexprs,
                register_ceiling=65536 // (_RESIDENT_PROGRAMS * 4 * 32),
                expects=("cp.async", "mma.sync", "atom", "griddepcontrol"),
            )
        )
    return found
