"""The attention kernels in Triton's interpreter, against float64; `interpreted.py` runs these checks."""

import math
import random
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.budget import examples
from tokentwin.realengine.kernels.kv_splits import Splits, plan_splits
from tokentwin.realengine.kernels.paged_attention import (
    PagedRows,
    Tile,
    attention_splits,
    make_tiles,
    paged_attention,
    tile_for,
    tile_tokens,
)

FP8 = torch.float8_e4m3fn
SMALL, LARGE = tile_for(1, False), tile_for(1 << 20, False)
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
    """Decode rows, then prefill rows, as the engine passes them to the kernels."""

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
        at = torch.arange(context)
        for cache in caches:
            slots = torch.tensor(table)[at // shape.page], slice(None), at % shape.page
            cache[slots] = torch.randn(context, shape.kv_heads, shape.dim)
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


def attended(shape: Shape, batch: Batch, window: int = 0) -> Tensor:
    """Return softmax(q K^T / sqrt(D)) V over what each token may see, in float64, from the definition."""
    out = torch.empty(batch.queries.shape, dtype=torch.float64)
    group = shape.heads // shape.kv_heads
    for row, context in enumerate(batch.context.tolist()):
        table = batch.blocks[int(batch.table_start[row]) :].long()
        at = torch.arange(context)
        keys, values = (
            cache.double()[table[at // shape.page], :, at % shape.page].repeat_interleave(group, dim=1) * scale
            for cache, scale in ((batch.keys, shape.k_scale), (batch.values, shape.v_scale))
        )  # [context, heads, dim]
        first, length = int(batch.query_start[row]), int(batch.query_len[row])
        for index in range(length):
            seen = context - length + index + 1
            view = slice(max(seen - window, 0) if window else 0, seen)
            scores = torch.einsum("hd,chd->hc", batch.queries[first + index].double(), keys[view]) * shape.dim**-0.5
            out[first + index] = torch.einsum("hc,chd->hd", torch.softmax(scores, dim=1), values[view])
    return out


def run_decode(
    shape: Shape, batch: Batch, rows: int, multiprocessors: int, out: Tensor, fixed: bool = False, window: int = 0
) -> Splits:
    sizes = (shape.heads, shape.kv_heads, shape.dim, multiprocessors, fixed)
    splits = poisoned_splits(attention_splits(batch.context, batch.query_len, rows, *sizes, window))
    for _ in range(2):  # as the layers of a step do
        how = (shape.dim**-0.5, shape.k_scale, shape.v_scale, window)
        paged_attention(*batch[:3], PagedRows(*batch[3:]), None, splits, out, *how)
    return splits


def run_prefill(
    shape: Shape, batch: Batch, first_row: int, multiprocessors: int, out: Tensor, padding: int = 0,
    fixed: bool = False, window: int = 0, tile: Tile = SMALL,
) -> Splits:  # fmt: skip
    lengths, contexts = batch.query_len.tolist(), batch.context.tolist()
    rows = [(row, lengths[row], contexts[row]) for row in range(first_row, len(lengths)) if lengths[row] > 1]
    tile_row, tile_first = (
        torch.from_numpy(np.append(tiles, [-1] * padding).astype(np.int32))
        for tiles in make_tiles(rows, tile_tokens(tile, shape.heads, shape.kv_heads))
    )
    sizes = (shape.heads, shape.kv_heads, shape.dim, multiprocessors, fixed)
    tiles = (tile_row, tile_first)
    splits = poisoned_splits(attention_splits(batch.context, batch.query_len, tiles, *sizes, window, tile))
    for _ in range(2):
        how = (shape.dim**-0.5, shape.k_scale, shape.v_scale, window)
        paged_attention(*batch[:3], PagedRows(*batch[3:]), tiles, splits, out, *how)
    return splits


def poisoned_splits(splits: Splits) -> Splits:
    splits.partial.fill_(float("nan"))
    splits.log_sums.fill_(float("nan"))
    return splits


def close(shape: Shape, out: Tensor, expected: Tensor, what: str) -> None:
    error = out.double() - expected
    relative = float(error.norm() / expected.norm())
    worst = float(error.abs().max())
    print(f"{what}: {relative:.1e} of the norm, {worst:.1e} at worst")
    assert relative <= TOLERANCE[shape.dtype], (what, relative)
    assert worst <= 5 * TOLERANCE[shape.dtype], (what, worst)


def poisoned(batch: Batch, dtype: torch.dtype) -> Tensor:
    return torch.full(batch.queries.shape, float("nan"), dtype=dtype)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = (
    Shape(3, 3, 64, 16, F32, F32),
    Shape(6, 2, 64, 32, F32, F32),
    Shape(4, 1, 128, 128, F16, F16),
    Shape(7, 1, 96, 16, BF16, BF16),
    Shape(8, 2, 128, 16, BF16, FP8, 0.5, 2.0),
    Shape(3, 1, 64, 32, F32, FP8, 0.25, 0.125),
)
MULTIPROCESSORS = st.sampled_from((1, 3, 16, 132))


@examples(0.1)
@given(
    st.sampled_from(SHAPES),
    st.lists(st.sampled_from((1, 15, 64, 65, 130, 200)), min_size=1, max_size=3),
    st.integers(0, 2),
    MULTIPROCESSORS,
    st.booleans(),
)
def decode(shape: Shape, contexts: list[int], padding: int, multiprocessors: int, fixed: bool) -> None:
    """Decode rows of many lengths, with padding rows, in one part and in several."""
    batch = batch_of(shape, [(context, 1) for context in [1] * padding + contexts], len(contexts), padding)
    out = poisoned(batch, shape.dtype)
    rows = padding + len(contexts)
    splits = run_decode(shape, batch, rows, multiprocessors, out, fixed)
    assert not splits.arrived.any()
    close(shape, out[padding:], attended(shape, batch)[padding:], f"{shape}, {contexts}, {multiprocessors}, {fixed}")


@examples(0.1)
@given(
    st.sampled_from(SHAPES[:5]),
    st.lists(st.sampled_from(((150, 1), (1, 1), (65, 1))), max_size=2),
    st.lists(
        st.sampled_from(((130, 130), (99, 50), (65, 2), (33, 33), (200, 5), (140, 35), (3, 3))), min_size=1, max_size=2
    ),
    st.integers(0, 3),
    MULTIPROCESSORS,
    st.booleans(),
    st.sampled_from((SMALL, LARGE)),
)
def prefill(
    shape: Shape, decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], padding: int, multiprocessors: int,
    fixed: bool, tile: Tile,
) -> None:  # fmt: skip
    """Whole prompts, chunks and drafts over past KV, after decode rows in the same batch, with tiles that are empty."""
    batch = batch_of(shape, [*decodes, *chunks], len(chunks))
    first = len(decodes)
    out = poisoned(batch, shape.dtype)
    splits = run_prefill(shape, batch, first, multiprocessors, out, padding, fixed, tile=tile)
    assert not splits.arrived.any()
    assert bool(out[:first].isnan().all()), "prefill wrote a token of no tile"
    if first:
        run_decode(shape, batch, len(decodes) + len(chunks), multiprocessors, out)  # the others are no decode rows
    close(shape, out, attended(shape, batch), f"{shape}, {decodes}, {chunks}, {multiprocessors}, {fixed}")


@examples(0.06)
@given(
    st.sampled_from((SHAPES[1], SHAPES[3], SHAPES[4])),
    st.lists(st.sampled_from((1, 64, 65, 130, 300)), min_size=1, max_size=3),
    st.lists(st.sampled_from(((130, 130), (99, 50), (200, 5), (140, 35))), min_size=1, max_size=2),
    st.sampled_from((2, 30, 64, 100, 500)),
    MULTIPROCESSORS,
    st.booleans(),
)
def windows(
    shape: Shape, contexts: list[int], chunks: list[tuple[int, int]], window: int, multiprocessors: int, fixed: bool
) -> None:
    """Each query sees the last tokens of its past; steps of 64 tokens that no query of a row sees are not read."""
    batch = batch_of(shape, [*((context, 1) for context in contexts), *chunks], window)
    wanted = attended(shape, batch, window)
    for row, (context, length) in enumerate(zip(batch.context.tolist(), batch.query_len.tolist(), strict=True)):
        for at in range(max(context - length + 1 - window, 0) // 64 * 64):
            block = int(batch.blocks[int(batch.table_start[row]) + at // shape.page])
            for cache in (batch.keys, batch.values):
                cache[block, :, at % shape.page] = float("nan")
    out = poisoned(batch, shape.dtype)
    run_prefill(shape, batch, len(contexts), multiprocessors, out, fixed=fixed, window=window)
    run_decode(shape, batch, len(contexts), multiprocessors, out, fixed, window)
    close(shape, out, wanted, f"{shape}, {contexts}, {chunks}, window {window}, {multiprocessors}, {fixed}")


@examples(0.8)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=40), st.integers(1, 60), st.integers(0, 16), st.booleans())
def splits(contexts: list[int], programs: int, most: int, few: bool) -> None:
    """Every step of 64 tokens is in one part; no part is empty or longer than it must be, and all parts fit in."""
    context = torch.tensor(contexts, dtype=torch.int32)
    alive = (context > 0).int()
    made = plan_splits(context, alive, None, len(contexts), 2, 1, 64, programs, most, 1, few_parts=few)
    items = [tuple(item) for item in made.items.tolist() if item[0] >= 0]
    steps = [-(-tokens // 64) for tokens in contexts]
    counts = {unit: parts for unit, _, parts, _ in items}
    assert sorted((unit, part) for unit, part, _, _ in items) == [
        (unit, part) for unit, parts in sorted(counts.items()) for part in range(parts)
    ]
    assert sorted(counts) == [unit for unit, length in enumerate(steps) if length]
    for unit, parts in counts.items():
        length = -(-steps[unit] // parts)
        assert (parts - 1) * length < steps[unit], "an empty part"
        if most:
            assert parts <= most and length == -(-steps[unit] // min(steps[unit], most))
    slots = [slot + part for _, part, parts, slot in items if parts > 1]
    assert len(set(slots)) == len(slots) and all(slot < len(made.partial) for slot in slots)
    if not most and counts:
        fitting = max(programs, len(counts) + programs // 2)
        longest = max(-(-steps[unit] // parts) for unit, parts in counts.items())
        assert len(items) <= fitting
        least = math.ceil(math.sqrt(max(steps) / 2)) if few else 1
        assert longest >= -(-max(steps) // -(-max(steps) // least))
        assert longest <= least or sum(-(-length // (longest - 1)) for length in steps) > fitting, "it could be shorter"


def one_long_row() -> None:
    """With a row of 16k tokens among 63 rows of 1k, no program reads more of the long row than a short row has."""
    context = torch.tensor([1024] * 31 + [16384] + [1024] * 32, dtype=torch.int32)
    made = attention_splits(context, torch.ones_like(context), 64, 32, 8, 128, 132, False)
    parts = {unit: parts for unit, _, parts, _ in made.items.tolist() if unit >= 0}
    assert parts.pop(31) == 16 and set(parts.values()) == {1}


def a_chunk_over_past() -> None:
    """64 new tokens over 8k cached: their four tiles for 8 KV heads use the GPU's multiprocessors in one wave."""
    context, length = torch.tensor([8256], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    row, first = (torch.from_numpy(tile) for tile in make_tiles([(0, 64, 8256)], tile_tokens(SMALL, 32, 8)))
    made = attention_splits(context, length, (row, first), 32, 8, 128, 132, False)
    programs = 8 * int((made.items[:, 0] >= 0).sum())
    assert 0.9 * 2 * 132 <= programs <= 2 * 132
    all_parts = attention_splits(context, length, (row, first), 32, 8, 128, 132, False, few_parts=False)
    used = made.items[:, 0] >= 0
    assert torch.equal(made.items[used], all_parts.items[used])
    whole = attention_splits(context, length, (row, first), 32, 8, 128, 132, True)
    assert 8 * int((whole.items[:, 0] >= 0).sum()) == 32


def a_draft_over_past() -> None:
    """Drafts of one request over 2k cached tokens, 33 steps: 33 parts of a step would be merged one after the other."""
    context, length = torch.tensor([2053], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    row, first = (torch.from_numpy(tile) for tile in make_tiles([(0, 5, 2053)], tile_tokens(SMALL, 32, 8)))
    for few, parts in ((True, 7), (False, 33)):
        made = attention_splits(context, length, (row, first), 32, 8, 128, 132, False, few_parts=few)
        assert int((made.items[:, 0] >= 0).sum()) == parts


def invariance() -> None:
    """With fixed splits a row's result is the same bit for bit, whether alone or at any place in any batch."""
    shape = Shape(6, 2, 64, 16, torch.float32, torch.float32)
    batch = batch_of(shape, [(140, 1), (1, 1), (77, 1), (200, 1)], seed=9)
    whole = poisoned(batch, shape.dtype)
    run_decode(shape, batch, 4, 132, whole, fixed=True)
    for chosen in ([3], [2, 0]):
        part = batch._replace(
            queries=batch.queries[chosen],
            context=batch.context[chosen],
            query_len=batch.query_len[chosen],
            table_start=batch.table_start[chosen],
        )
        out = poisoned(part, shape.dtype)
        run_decode(shape, part, len(chosen), 132, out, fixed=True)
        assert torch.equal(out, whole[chosen]), chosen


CHECKS = (decode, prefill, windows, splits, one_long_row, a_chunk_over_past, a_draft_over_past, invariance)
