"""The attention kernels in Triton's interpreter, against float64; `interpreted.py` runs these checks."""

import random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realengine.kernels.paged_decode import FIXED_SPLITS, paged_decode, partials_for
from realengine.kernels.paged_prefill import make_tiles, paged_prefill, tile_tokens

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the error's norm


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype
    cached: torch.dtype
    k_scale: float = 1.0
    v_scale: float = 1.0


class Batch(NamedTuple):
    """Decode rows, then prefill rows, as the engine hands them to the kernels."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    context: Tensor
    query_start: Tensor
    query_len: Tensor
    blocks: Tensor
    table_start: Tensor


def batch_of(shape: Shape, rows: list[tuple[int, int]], seed: int, padding: int = 0) -> Batch:
    """A batch of (context, query tokens) rows, whose blocks are shuffled over a cache with NaN wherever no row writes.

    The first `padding` rows are a decode bucket's: context 1 in the null block.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    needed = [-(-context // shape.page) for context, _ in rows[padding:]]
    pool = 1 + sum(needed) + 3
    free = random.sample(range(1, pool), sum(needed))
    tables = [[0]] * padding + [[free.pop() for _ in range(count)] for count in needed]
    caches = [torch.full((pool, shape.kv_heads, shape.page, shape.dim), float("nan")) for _ in range(2)]
    for (context, _), table in zip(rows, tables, strict=True):
        for position in range(context):
            for cache in caches:
                cache[table[position // shape.page], :, position % shape.page] = torch.randn(shape.kv_heads, shape.dim)
    lengths = [length for _, length in rows]
    merged = torch.randn(sum(lengths), shape.heads + 2 * shape.kv_heads, shape.dim, dtype=shape.dtype)
    starts = lambda counts: torch.tensor(np.cumsum([0, *counts[:-1]]), dtype=torch.int32)  # noqa: E731
    return Batch(
        queries=merged[:, : shape.heads],
        keys=(caches[0] / shape.k_scale).to(shape.cached),
        values=(caches[1] / shape.v_scale).to(shape.cached),
        context=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        query_start=starts(lengths),
        query_len=torch.tensor(lengths, dtype=torch.int32),
        blocks=torch.tensor([block for table in tables for block in table], dtype=torch.int32),
        table_start=starts([len(table) for table in tables]),
    )


def attended(shape: Shape, batch: Batch) -> Tensor:
    """softmax(q K^T / sqrt(D)) V over what each token may see, in float64, from the definition."""
    out = torch.empty(batch.queries.shape, dtype=torch.float64)
    keys, values = batch.keys.double() * shape.k_scale, batch.values.double() * shape.v_scale
    group = shape.heads // shape.kv_heads
    for row, context in enumerate(batch.context.tolist()):
        table = batch.blocks[int(batch.table_start[row]) :]
        length = int(batch.query_len[row])
        for index in range(length):
            seen = [(int(table[at // shape.page]), at % shape.page) for at in range(context - length + index + 1)]
            token = int(batch.query_start[row]) + index
            for head in range(shape.heads):
                key = torch.stack([keys[block, head // group, offset] for block, offset in seen])
                value = torch.stack([values[block, head // group, offset] for block, offset in seen])
                scores = key @ batch.queries[token, head].double() * shape.dim**-0.5
                out[token, head] = torch.softmax(scores, dim=0) @ value
    return out


def run_decode(shape: Shape, batch: Batch, rows: int, splits: int, out: Tensor) -> None:
    partials = partials_for(rows, shape.heads, splits, shape.dim, torch.device("cpu")) if splits > 1 else None
    for partial in partials or ():
        partial.fill_(float("nan"))
    paged_decode(
        batch.queries, batch.keys, batch.values, batch.context, batch.blocks, batch.table_start, rows, splits, out,
        partials, shape.dim**-0.5, shape.k_scale, shape.v_scale,
    )  # fmt: skip


def run_prefill(shape: Shape, batch: Batch, first_row: int, out: Tensor) -> None:
    lengths, contexts = batch.query_len.tolist(), batch.context.tolist()
    rows = [(row, lengths[row], contexts[row]) for row in range(first_row, len(lengths))]
    tile_row, tile_first = make_tiles(rows, tile_tokens(shape.heads, shape.kv_heads))
    paged_prefill(
        batch.queries, batch.keys, batch.values, batch.context, batch.query_start, batch.query_len, batch.blocks,
        batch.table_start, torch.from_numpy(tile_row), torch.from_numpy(tile_first), out,
        shape.dim**-0.5, shape.k_scale, shape.v_scale,
    )  # fmt: skip


def close(shape: Shape, out: Tensor, expected: Tensor, what: str) -> None:
    error = out.double() - expected
    relative = float(error.norm() / expected.norm())
    worst = float(error.abs().max())
    print(f"{what}: {relative:.1e} of the norm, {worst:.1e} at worst")
    assert relative <= TOLERANCE[shape.dtype], (what, relative)
    assert worst <= 5 * TOLERANCE[shape.dtype], (what, worst)


def poisoned(batch: Batch, dtype: torch.dtype) -> Tensor:
    return torch.full(batch.queries.shape, float("nan"), dtype=dtype)


def decode() -> None:
    """Rows of many lengths, with padding rows, in one split and in several, some of which are empty."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for seed, (shape, splits) in enumerate(
        [
            (Shape(3, 3, 64, 16, f32, f32), 1),
            (Shape(6, 2, 64, 32, f32, f32), 4),
            (Shape(4, 1, 128, 128, f16, f16), 2),
            (Shape(7, 1, 96, 16, bf16, bf16), 4),
            (Shape(8, 2, 128, 16, bf16, FP8, 0.5, 2.0), 8),
            (Shape(3, 1, 64, 32, f32, FP8, 0.25, 0.125), 1),
        ]
    ):
        padding = seed % 3
        rows = [(1, 1)] * padding + [(random.Random(seed + at).choice((1, 15, 64, 65, 300)), 1) for at in range(3)]
        batch = batch_of(shape, rows, seed, padding)
        out = poisoned(batch, shape.dtype)
        run_decode(shape, batch, len(rows), splits, out)
        expected = attended(shape, batch)
        close(shape, out[padding:], expected[padding:], f"{shape}, {splits} splits")


def prefill() -> None:
    """Whole prompts and chunks over past KV, after decode rows in the same batch: both kernels fill all of it."""
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for seed, (shape, rows) in enumerate(
        [
            (Shape(3, 3, 64, 16, f32, f32), [(150, 1), (130, 130), (1, 1)]),
            (Shape(6, 2, 64, 32, f32, f32), [(17, 1), (70, 1), (99, 50), (65, 2)]),
            (Shape(4, 1, 128, 128, f16, f16), [(90, 40), (33, 33)]),
            (Shape(7, 1, 96, 16, bf16, bf16), [(5, 1), (140, 20), (64, 1)]),
            (Shape(8, 2, 128, 16, bf16, FP8, 0.5, 2.0), [(200, 35), (3, 3)]),
        ]
    ):
        decodes = next(at for at, (_, length) in enumerate(rows) if length > 1)
        batch = batch_of(shape, rows, seed)
        out = poisoned(batch, shape.dtype)
        run_prefill(shape, batch, decodes, out)
        assert bool(out[:decodes].isnan().all()), "prefill wrote a token of no tile"
        if decodes:
            run_decode(shape, batch, decodes, 2, out)
        close(shape, out, attended(shape, batch), str(shape))


def invariance() -> None:
    """With fixed splits a row's result is the same bit for bit, alone and in any place of any batch."""
    shape = Shape(6, 2, 64, 16, torch.float32, torch.float32)
    batch = batch_of(shape, [(200, 1), (1, 1), (77, 1), (300, 1)], seed=9)
    whole = poisoned(batch, shape.dtype)
    run_decode(shape, batch, 4, FIXED_SPLITS, whole)
    for chosen in ([3], [2, 0, 3]):
        part = batch._replace(
            queries=batch.queries[chosen], context=batch.context[chosen], table_start=batch.table_start[chosen]
        )
        out = poisoned(part, shape.dtype)
        run_decode(shape, part, len(chosen), FIXED_SPLITS, out)
        assert torch.equal(out, whole[chosen]), chosen


CHECKS = (decode, prefill, invariance)
