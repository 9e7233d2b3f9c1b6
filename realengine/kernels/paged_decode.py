"""Attention of decode rows, one query token each, over a paged KV cache.

The query heads that share a KV head are packed into one tile, so that its KV is read once (GQA packing), and a row's
KV is split among programs, whose partial results a second kernel merges by their log-sum-exp (Flash-Decoding, Dao et
al. 2023), so that a few rows fill the GPU. Which tokens a split reads depends on its row's context, which the program
loads, and on `splits` alone: a launch can be replayed with other contents, and at FIXED_SPLITS a row's result does not
depend on the batch that it is in.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import SHAPES, TRITON_NAME
from realengine.kernels.attention_tile import LOG2_E, attend_tile, load_heads
from realengine.kernels.interpreting import compute_dtype

if TYPE_CHECKING:
    from realengine.kernels.aot import Specialisation

FIXED_SPLITS = 16  # of the batch-invariant mode: enough for one row of 8 KV heads to reach a program per multiprocessor
_KV_TILE = 64  # tokens
_MAX_SPLITS = 64
_RESIDENT_PROGRAMS = 3  # on one multiprocessor, by the registers and shared memory of `specialisations`


@triton.jit
def _decode_split(
    queries,
    keys,
    values,
    context,
    blocks,
    table_start,
    out,
    log_sums,
    scale_log2,
    value_scale,
    query_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (row, KV head, split): `out` is [T, H, D] if SPLITS is 1, else the partials [rows, H, SPLITS, D]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_M: tl.constexpr = max(16, triton.next_power_of_2(GROUP))  # 16 rows: the least that tensor cores take
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    tokens = tl.load(context + row)
    table = blocks + tl.load(table_start + row)
    tiles_each = tl.cdiv(tl.cdiv(tokens, BLOCK_N), SPLITS)
    begin = split * tiles_each * BLOCK_N
    end = tl.minimum(tokens, begin + tiles_each * BLOCK_N)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    present = members < GROUP
    heads = kv_head * GROUP + members
    places = (row.to(tl.int64) * HEADS + heads) * SPLITS + split
    if begin < end:
        query = load_heads(queries, row + members * 0, heads, dims, query_stride, present, DIM, COMPUTE)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        visible = tokens + members * 0
        for first in tl.range(begin, whole, BLOCK_N):
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, first, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, False, COMPUTE,
            )  # fmt: skip
        if whole < end:
            weighted, total, highest = attend_tile(
                query, weighted, total, highest, keys, values, table, whole, visible, tokens, kv_head, dims,
                scale_log2, KV_HEADS, DIM, PAGE, BLOCK_N, True, COMPUTE,
            )  # fmt: skip
        result = weighted * (value_scale / total)[:, None]
        kept = present[:, None] & (dims[None, :] < DIM)
        tl.store(out + places[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=kept)
        if SPLITS > 1:
            tl.store(log_sums + places, highest + tl.log2(total), mask=present)
    elif SPLITS > 1:  # more splits than tiles: the merge counts nothing of this one, nor reads more than this
        tl.store(log_sums + places, float("-inf"), mask=present)


@triton.jit
def _decode_merge(partial, log_sums, out, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Program (row, head): the mean of the splits' results, each weighted with exp2 of its log-sum-exp."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    log_sum = tl.load(log_sums + place * SPLITS + splits)
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    filled = (log_sum > float("-inf"))[:, None] & (dims[None, :] < DIM)
    parts = tl.load(partial + (place * SPLITS + splits)[:, None] * DIM + dims[None, :], mask=filled, other=0.0)
    merged = tl.sum(parts * weights[:, None], axis=0)
    tl.store(out + place * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    context: Tensor,
    blocks: Tensor,
    table_start: Tensor,
    rows: int,
    splits: int,
    out: Tensor,
    partials: tuple[Tensor, Tensor] | None,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write attention of tokens 0 to `rows - 1`, which are rows 0 to `rows - 1` of the batch, to their part of `out`.

    queries      [T, H, D] bf16, fp16 or fp32; tokens may lie further apart than H x D, as in a merged QKV
    keys         [blocks, KV heads, block size, D], as `queries` or fp8 e4m3, contiguous; `values` likewise
    context      [R] int32, KV tokens of each row, at least 1
    blocks       int32, block ids of all rows; those of row r begin at `table_start[r]` ([R] int32)
    splits       programs among which a row's KV is divided: a power of two
    out          [T, H, D] contiguous
    partials     of `partials_for` for at least these rows and splits; not used if splits is 1
    scale        of the scores, D ** -0.5 as a rule
    k_scale      what stored keys are multiplied by to give keys; `v_scale` likewise

    Only buffers' contents decide what a row reads, so that the launch can be captured in a CUDA graph for these
    `rows` and `splits`.
    """
    heads, dim = queries.shape[1:]
    _, kv_heads, page, _ = keys.shape
    results, log_sums = partials if splits > 1 else (out, out)
    _decode_split[(rows, kv_heads, splits)](
        queries, keys, values, context, blocks, table_start, results, log_sums,
        scale * k_scale * LOG2_E, v_scale, queries.stride(0),
        **_compiled_in(heads, kv_heads, dim, page, splits, queries.dtype, keys.dtype),
    )  # fmt: skip
    if splits > 1:
        _decode_merge[(rows, heads)](results, log_sums, out, HEADS=heads, DIM=dim, SPLITS=splits, num_warps=4)


def partials_for(rows: int, heads: int, splits: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32 memory for the splits' results, [rows, heads, splits, dim], and log2-sum-exps, [rows, heads, splits]."""
    results = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=device)
    return results, torch.empty(rows, heads, splits, dtype=torch.float32, device=device)


def choose_splits(rows: int, kv_heads: int, longest_context: int, multiprocessors: int) -> int:
    """The number of splits, a power of two up to 64, that fills the GPU for `rows` decode rows.

    The fewest that give each multiprocessor as many programs as it holds at once, so that enough loads are in flight
    to keep its memory busy, but never more than the longest context (tokens) has KV tiles, for those beyond would
    have nothing to read.
    """
    wanted = _RESIDENT_PROGRAMS * multiprocessors
    tiles = triton.cdiv(longest_context, _KV_TILE)
    splits = 1
    while rows * kv_heads * splits < wanted and 2 * splits <= min(tiles, _MAX_SPLITS):
        splits *= 2
    return splits


def _compiled_in(
    heads: int, kv_heads: int, dim: int, page: int, splits: int, dtype: torch.dtype, cached: torch.dtype
) -> dict[str, Any]:
    """All of a launch that is compiled into its kernel.

    Tile and pipeline keep some 64 KB of loads in flight on a multiprocessor, twice what latency x bandwidth asks for
    (Little's law). Tiles that are converted, from fp8 or for three TF32 products, are narrower for want of registers.
    """
    narrow = dtype == torch.float32 or (cached == torch.float8_e4m3fn and dim > 64)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "PAGE": page,
        "SPLITS": splits,
        "BLOCK_N": _KV_TILE // 2 if narrow else _KV_TILE,
        "COMPUTE": compute_dtype(dtype),
        "num_warps": 4,
        "num_stages": 5 if dim > 64 and cached.itemsize > 1 else 7,
    }


def specialisations() -> list["Specialisation"]:
    """How `paged_decode` launches its kernels: with splits for every shape, without for one."""
    from realengine.kernels.aot import Specialisation

    found = []
    for shape, splits in [(SHAPES[0], 1), *((shape, FIXED_SPLITS) for shape in SHAPES)]:
        constexprs = _compiled_in(shape.heads, shape.kv_heads, shape.dim, shape.page, splits, shape.dtype, shape.cached)
        stored, cached = "*" + TRITON_NAME[shape.dtype], "*" + TRITON_NAME[shape.cached]
        results = stored if splits == 1 else "*fp32"
        found.append(
            Specialisation(
                name=f"paged_decode {shape.name}, {splits} splits",
                kernel=_decode_split,
                signature={
                    "queries": stored,
                    "keys": cached,
                    "values": cached,
                    "context": "*i32",
                    "blocks": "*i32",
                    "table_start": "*i32",
                    "out": results,
                    "log_sums": results,
                    "scale_log2": "fp32",
                    "value_scale": "fp32",
                    "query_stride": "i32",
                },
                num_warps=constexprs.pop("num_warps"),
                num_stages=constexprs.pop("num_stages"),
                constexprs=constexprs,
                register_ceiling=65536 // (_RESIDENT_PROGRAMS * 4 * 32),
                expects=("cp.async", "mma.sync"),
            )
        )
    shape = SHAPES[0]
    merge = Specialisation(
        name=f"paged_decode merge {shape.name}, {FIXED_SPLITS} splits",
        kernel=_decode_merge,
        signature={"partial": "*fp32", "log_sums": "*fp32", "out": "*" + TRITON_NAME[shape.dtype]},
        constexprs={"HEADS": shape.heads, "DIM": shape.dim, "SPLITS": FIXED_SPLITS},
        num_warps=4,
        num_stages=3,
        register_ceiling=64,
        expects=(),
    )
    return [*found, merge]
