"""The division of attention's KV among programs: decided on the device once a step, and joined by the last program.

A *unit* is a decode row or a prefill tile. It reads KV from its row's beginning, or from the step in which its window
begins, in steps of 64 tokens. All units are cut at one length, the shortest at which the parts still fit into the
programs that the GPU has. So equal rows that fill it stay whole, and a long row among them is shared. Contexts are read
on the device, so that a launch, and a CUDA graph of it, is the same for all of them.

A part stores its result and log-sum-exp in memory (Flash-Decoding, Dao et al. 2023) and counts itself. The last of a
unit's parts merges them, always in their order, so that a result does not depend on which part came last.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_tile import LOWEST
from realengine.kernels.launches import F32, I32, Specialisation, shaped

_CHUNK = 1024  # units that the planning program looks at together
_FIELDS = tl.constexpr(4)  # numbers of an item
STEP = tl.constexpr(64)  # tokens that parts are counted in: a multiple of every KV tile


class Splits(NamedTuple):
    """A step's parts of one kind, the same for every layer; each layer overwrites the results of the layer before.

    Attributes:
        items: [n, 4] int32: unit or -1 for none, part, parts of the unit, and the slot of the unit's first part
        arrived: [slots, KV heads] int32, number of a unit's finished parts, at its first slot; 0 between launches
        partial: [slots, KV heads, members, D] fp32, results; `members` are query rows of a unit for one KV head
        log_sums: [slots, KV heads, members] fp32, in units of log2
    """

    items: Tensor
    arrived: Tensor
    partial: Tensor
    log_sums: Tensor


NO_SPLITS = Splits(shaped(1, 4, dtype=I32), shaped(1, 1, dtype=I32), *[shaped(1, dtype=F32)] * 2)  # to compile ahead


@triton.jit
def passed_steps(visible, WINDOW: tl.constexpr):
    """Return the tokens of whole steps that a query does not see.

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
    """Return the steps of KV that each unit reads; 0 for items that are no units."""
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
):
    """Write all of `items`, and zeros to `arrived`, in one program."""
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
        parts = tl.cdiv(steps, tl.maximum(tl.cdiv(steps, tl.maximum(parts, 1)), 1))  # of equal length, none empty
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
    """Return whether every other part of the unit has been stored; the count then begins anew."""
    tl.debug_barrier()  # stores of this program's other threads come before the count
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
    """Return [ROWS, dims] fp32: each member's mean of its parts, weighted with exp2 of their log-sum-exp.

    Args:
        slot: slot of the unit's first part
        ROWS: a power of two, at least MEMBERS
        TOGETHER: parts loaded at once, a power of two: enough loads are in flight to hide the memory's latency
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
        # The load bypasses the L1 cache, which may have the last layer's results.
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
) -> Splits:
    """Divide the KV of `units` units.

    Args:
        context: [R] int32, KV tokens of each row; `query_len` [R] int32, its query tokens
        tiles: `tile_row`, in which -1 is no tile, and `tile_first` of a prefill; None for the first `units` rows, of
            which those with one query token are units
        members: query rows of a unit for one KV head, each of `dim` dimensions
        programs: programs for each KV head that the GPU runs at once
        most: parts that every unit is cut into, as far as it has steps; 0 to let `programs` decide
        tokens: query tokens of a prefill tile
        window: tokens that a query sees; 0 is all

    With `most` 0 no part is longer than it must be for max(programs, units + programs / 2) of them, and at most
    `programs` are parts of a unit that was cut.
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
        programs, most, tiles is not None, tokens, _CHUNK, window, num_warps=4, num_stages=1,
    )  # fmt: skip
    return Splits(items, arrived, partial, log_sums)


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for Llama-3.1-8B."""
    row = shaped(1, dtype=I32)
    for name, most, tokens in (("decode", 0, 1), ("decode, batch-invariant", 16, 1), ("prefill", 0, 32)):
        tiles = (row, row) if name == "prefill" else None
        launch = partial(plan_splits, row, row, tiles, 1, 8, 4, 128, 49, most, tokens)
        yield Specialisation(f"plan_splits {name}", _plan_splits, launch, 128, ())
