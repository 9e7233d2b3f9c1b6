"""The division of attention's KV among programs, decided on the device once a step, and the merge of the results.

A *unit* is a decode row or a prefill tile. It reads KV in steps of 64 tokens, from the beginning of its row or from the
step in which its window begins. All units are cut into parts of the same maximum length: the shortest length for which
the GPU has enough programs. So rows of equal length that fill the GPU stay whole, and a much longer row among them is
divided. Contexts are read on the device, so that one launch, and a CUDA graph of it, works for all contexts.

A part stores its result and log-sum-exp in memory (Flash-Decoding, Dao et al. 2023) and increments a counter. The part
that finishes last merges all parts of its unit, always in the order of the parts, so that the result does not depend on
which part finished last.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.attention_tile import LOWEST
from tokentwin.realengine.kernels.launches import F32, I32, Specialisation, shaped

_CHUNK = 1024  # number of units that the planning program handles at once
_FIELDS = tl.constexpr(4)  # number of fields of an item
STEP = tl.constexpr(64)  # tokens of a step, the unit in which parts are cut: a multiple of every KV tile


class Splits(NamedTuple):
    """The parts of decode rows or of tiles in one step; all layers use them, and each overwrites the previous results.

    Attributes:
        items: [n, 4] int32: index of the unit (-1 for an unused item), index of the part, number of parts of the unit,
            and slot of the unit's first part
        arrived: [slots, KV heads] int32, number of finished parts of a unit, at the unit's first slot; 0 between
            launches
        partial: [slots, KV heads, members, D] fp32, results; `members` is the number of query rows of a unit for one KV
            head
        log_sums: [slots, KV heads, members] fp32, in units of log2
    """

    items: Tensor
    arrived: Tensor
    partial: Tensor
    log_sums: Tensor


NO_SPLITS = Splits(shaped(1, 4, dtype=I32), shaped(1, 1, dtype=I32), *[shaped(1, dtype=F32)] * 2)  # to compile ahead


@triton.jit
def passed_steps(visible, WINDOW: tl.constexpr):
    """Return the number of leading tokens, in whole steps, that a query does not see.

    It sees the last WINDOW of `visible` tokens, or all if WINDOW is 0.
    """
    if WINDOW:
        return tl.maximum(visible - WINDOW, 0) // STEP * STEP
    return visible * 0


@triton.jit
def _steps_of(
    unit, units, context, query_len, tile_row, tile_first, PREFILL: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the number of steps of KV that each unit reads; 0 for indices without a unit."""
    inside = unit < units
    if PREFILL:
        row = tl.load(tile_row + unit, mask=inside, other=-1)
        inside = row >= 0
        tokens = tl.load(context + row, mask=inside, other=0)
        past = tokens - tl.load(query_len + row, mask=inside, other=0)
        first = past + tl.load(tile_first + unit, mask=inside, other=0)
        tokens = tl.minimum(tokens, first + TOKENS) - passed_steps(first + 1, WINDOW)
        tokens = tl.where(inside, tokens, 0)
    else:
        tokens = tl.load(context + unit, mask=inside, other=0)
        tokens -= passed_steps(tokens, WINDOW)
        tokens = tl.where(tl.load(query_len + unit, mask=inside, other=0) == 1, tokens, 0)
    return tl.cdiv(tokens, STEP)


@triton.jit(do_not_specialize=["units", "capacity", "counters", "programs"])
def _plan_splits(
    context,
    query_len,
    tile_row,
    tile_first,
    items,
    arrived,
    units,
    capacity,
    counters,
    programs,
    MOST: tl.constexpr,
    PREFILL: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    FEW_PARTS: tl.constexpr,
):
    """Write all of `items`, and zeros to `arrived`; a single program does this."""
    at = tl.arange(0, CHUNK)
    present = 0
    longest = 1
    for first in range(0, units, CHUNK):
        steps = _steps_of(first + at, units, context, query_len, tile_row, tile_first, PREFILL, TOKENS, WINDOW)
        present += tl.sum((steps > 0).to(tl.int32))
        longest = tl.maximum(longest, tl.max(steps))
    length = longest
    if MOST == 0:
        fitting = tl.maximum(programs, present + programs // 2)
        shortest = 1
        if FEW_PARTS:
            shortest = tl.sqrt_rn(longest / 2).to(tl.int32)
            shortest = tl.minimum(shortest + (2 * shortest * shortest < longest).to(tl.int32), length)
        while shortest < length:
            middle = (shortest + length) // 2
            parts = 0
            for first in range(0, units, CHUNK):
                steps = _steps_of(first + at, units, context, query_len, tile_row, tile_first, PREFILL, TOKENS, WINDOW)
                parts += tl.sum(tl.cdiv(steps, middle))
            length = tl.where(parts <= fitting, middle, length)
            shortest = tl.where(parts <= fitting, shortest, middle + 1)
    next_item = 0
    next_slot = 0
    for first in range(0, units, CHUNK):
        steps = _steps_of(first + at, units, context, query_len, tile_row, tile_first, PREFILL, TOKENS, WINDOW)
        parts = tl.cdiv(steps, length) if MOST == 0 else tl.minimum(steps, MOST)
        # parts of equal length, none of which is empty
        parts = tl.cdiv(steps, tl.maximum(tl.cdiv(steps, tl.maximum(parts, 1)), 1))
        slots = tl.where(parts > 1, parts, 0)
        item = next_item + tl.cumsum(parts, 0) - parts
        slot = next_slot + tl.cumsum(slots, 0) - slots
        for part in tl.range(tl.max(parts)):
            inside = part < parts
            place = items + (item + part) * _FIELDS
            tl.store(place, first + at, mask=inside)
            tl.store(place + 1, part + at * 0, mask=inside)
            tl.store(place + 2, parts, mask=inside)
            tl.store(place + 3, slot, mask=inside)
        next_item += tl.sum(parts)
        next_slot += tl.sum(slots)
    for first in range(next_item, capacity, CHUNK):
        tl.store(items + (first + at) * _FIELDS, -1 + at * 0, mask=first + at < capacity)
    for first in range(0, counters, CHUNK):
        tl.store(arrived + first + at, at * 0, mask=first + at < counters)


@triton.jit
def is_last_part(arrived, slot, parts, kv_head, KV_HEADS: tl.constexpr):
    """Return whether all other parts of the unit have been stored; if so, reset the counter."""
    tl.debug_barrier()  # all threads of the program must have stored their results before the counter is increased
    counter = arrived + slot * KV_HEADS + kv_head
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merged_parts(
    partial,
    log_sums,
    slot,
    parts,
    kv_head,
    dims,
    KV_HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    DIM: tl.constexpr,
):
    """Return [ROWS, dims] fp32: for each member the mean of its parts, weighted with exp2 of their log-sum-exp.

    Args:
        slot: slot of the unit's first part
        ROWS: a power of two, at least MEMBERS
        TOGETHER: number of parts loaded at once, a power of two, so that enough loads are in flight to hide the latency
    """
    flat = tl.arange(0, TOGETHER * ROWS)
    part = flat // ROWS
    member = flat % ROWS
    weighted = tl.zeros([ROWS, dims.shape[0]], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    for first in tl.range(0, parts, TOGETHER):
        inside = (first + part < parts) & (member < MEMBERS)
        place = ((slot + first + part).to(tl.int64) * KV_HEADS + kv_head) * MEMBERS + member
        # The load bypasses the L1 cache, which may still have the results of the layer before.
        log_sum = tl.load(log_sums + place, mask=inside, other=float("-inf"), cache_modifier=".cg")
        kept = inside[:, None] & (dims[None, :] < DIM)
        result = tl.load(partial + place[:, None] * DIM + dims[None, :], mask=kept, other=0.0, cache_modifier=".cg")
        log_sum = tl.reshape(log_sum, [TOGETHER, ROWS])
        new_highest = tl.maximum(highest, tl.max(log_sum, axis=0))
        weights = tl.exp2(log_sum - new_highest[None, :])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, axis=0)
        result = tl.reshape(result, [TOGETHER, ROWS, dims.shape[0]]) * weights[:, :, None]
        weighted = weighted * decay[:, None] + tl.sum(result, axis=0)
        highest = new_highest
    return weighted / total[:, None]


def plan_splits(
    context: Tensor,
    query_len: Tensor,
    tiles: tuple[Tensor, Tensor] | None,
    units: int,
    kv_heads: int,
    members: int,
    dim: int,
    programs: int,
    most: int,
    tokens: int,
    window: int = 0,
    few_parts: bool = False,
) -> Splits:
    """Divide the KV of `units` units.

    Args:
        context: [R] int32, number of KV tokens of each row; `query_len` [R] int32, number of its query tokens
        tiles: `tile_row`, where -1 means no tile, and `tile_first` of a prefill; None for a decode, whose units are
            those of the first `units` rows that have one query token
        members: number of query rows of a unit for one KV head, each of `dim` dimensions
        programs: number of programs for each KV head that the GPU runs at once
        most: number of parts that every unit is cut into, if it has as many steps; 0 to choose by `programs`
        tokens: number of query tokens of a prefill tile
        window: number of tokens that a query sees; 0 means all
        few_parts: True to limit parts also by the time of their merge: to a length of at least sqrt(steps / 2) of the
            longest unit. The merge of a tile takes one part after the other, each in about half the time of a step, so
            this length is about that of the least total time

    If `most` is 0, parts have the shortest maximum length at which there are at most max(programs, units + programs /
    2) parts. Then at most `programs` parts belong to units that were cut.
    """
    if most:
        capacity = units * most
        slots = capacity if most > 1 else 1
    else:
        capacity = max(programs, units + programs // 2)
        slots = programs
    device = context.device
    items = torch.empty(capacity, 4, dtype=torch.int32, device=device)
    arrived = torch.empty(slots, kv_heads, dtype=torch.int32, device=device)
    partial = torch.empty(slots, kv_heads, members, dim, dtype=torch.float32, device=device)
    log_sums = torch.empty(slots, kv_heads, members, dtype=torch.float32, device=device)
    tile_row, tile_first = tiles or (context, context)
    _plan_splits[(1,)](
        context, query_len, tile_row, tile_first, items, arrived, units, capacity, slots * kv_heads,
        programs, most, tiles is not None, tokens, _CHUNK, window, few_parts, num_warps=4, num_stages=1,
    )  # fmt: skip
    return Splits(items, arrived, partial, log_sums)


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for Llama-3.1-8B."""
    row = shaped(1, dtype=I32)
    for name, most, tokens in (("decode", 0, 1), ("decode, batch-invariant", 16, 1), ("prefill", 0, 32)):
        tiles = (row, row) if name == "prefill" else None
        launch = partial(plan_splits, row, row, tiles, 1, 8, 4, 128, 49, most, tokens, few_parts=tiles is not None)
        yield Specialisation(f"plan_splits {name}", _plan_splits, launch, 128, ())
