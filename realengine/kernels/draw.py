"""Sampling with temperature, top-k and top-p, one program a row, without a sort and without asking the host.

Both limits are thresholds on the logit. Each is computed by bisection, with three pivots a pass, on the integers that
order as floats do. A pass over a whole vocabulary is expensive, so a row is first thinned to the logits above a bar
that is low enough for the k-th largest, or likely so for the nucleus. As long as these logits suffice, which the
program checks, the bisection reads nothing else. After that the token is drawn in vocabulary order.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import F32, I32, TRITON_NAME, shaped
from realengine.kernels.specialisation import Specialisation

_GREEDY_BELOW = tl.constexpr(1e-5)  # the temperature below which `realengine.sampling` is also greedy
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2147483647)

# Logits read at once, lanes of the first pass, and most logits that a row is thinned to; more would spill registers.
_BLOCK = {torch.float32: 4096, torch.bfloat16: 8192, torch.float16: 8192}

# In fp32, 16 and 13 low bits of the image of a bf16 and an fp16 are always the same: bisection need not settle them.
_IDLE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _image(value, IDLE: tl.constexpr):
    """Return the integer (int64) of an fp32 that orders as it does, without its `IDLE` low bits."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> IDLE).to(tl.int64)


@triton.jit
def _value(image, IDLE: tl.constexpr):
    """Return the fp32 of an image."""
    bits = (image << IDLE).to(tl.int32)
    negative = bits >> 31
    return ((bits | (negative & ((1 << IDLE) - 1))) ^ (negative & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(source, at, size):
    return tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(value, highest, rate, COUNT: tl.constexpr):
    """Return the weight of a logit: one, or its probability relative to the likeliest's."""
    return tl.full(value.shape, 1.0, tl.float32) if COUNT else tl.exp2((value - highest) * rate)


@triton.jit
def _mass(source, size, least, highest, rate, BLOCK: tl.constexpr):
    """Return the probability, relative to the likeliest's, of the logits of `source` that are at least `least`."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK):
        value = _load(source, start + lanes, size)
        total += tl.where(value >= least, _weight(value, highest, rate, False), 0.0)
    return tl.sum(total)


@triton.jit
def _largest_reaching(
    source, size, goal, low, low_weight, highest, rate, COUNT: tl.constexpr, IDLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest t in [low, highest] such that the logits >= t weigh at least `goal`, and their weight.

    `low` is such a t, with the weight `low_weight`. A pass leaves a quarter of the images in question, so there are at
    most 16 passes for fp32, 10 for fp16 and 8 for bf16.
    """
    lanes = tl.arange(0, BLOCK)
    lower = _image(low, IDLE)  # reaches the goal
    upper = _image(highest, IDLE) + 1  # does not, or need not
    weight = low_weight
    while upper - lower > 1:
        step = (upper - lower + 3) // 4
        first = lower + step
        second = tl.minimum(first + step, upper - 1)
        third = tl.minimum(second + step, upper - 1)
        first_value = _value(first, IDLE)
        second_value = _value(second, IDLE)
        third_value = _value(third, IDLE)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = tl.zeros([BLOCK], tl.float32)
        above_third = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, size, BLOCK):
            value = _load(source, start + lanes, size)
            counts = _weight(value, highest, rate, COUNT)
            above_first += tl.where(value >= first_value, counts, 0.0)
            above_second += tl.where(value >= second_value, counts, 0.0)
            above_third += tl.where(value >= third_value, counts, 0.0)
        first_weight = tl.sum(above_first)
        second_weight = tl.sum(above_second)
        third_weight = tl.sum(above_third)
        to_third = third_weight >= goal
        to_second = second_weight >= goal
        to_first = first_weight >= goal
        upper = tl.where(to_third, upper, tl.where(to_second, third, tl.where(to_first, second, first)))
        lower = tl.where(to_third, third, tl.where(to_second, second, tl.where(to_first, first, lower)))
        next_weight = tl.where(to_second, second_weight, tl.where(to_first, first_weight, weight))
        weight = tl.where(to_third, third_weight, next_weight)
    return _value(lower, IDLE), weight


@triton.jit
def _thin(logits, vocab, bar, kept, BLOCK: tl.constexpr):
    """Copy the logits that are at least `bar` to `kept`, the first BLOCK of them, and return their number."""
    lanes = tl.arange(0, BLOCK)
    count = 0
    for start in tl.range(0, vocab, BLOCK):
        value = _load(logits, start + lanes, vocab)
        chosen = ((value >= bar) & (start + lanes < vocab)).to(tl.int32)
        place = count + tl.cumsum(chosen, axis=0) - 1
        tl.store(kept + place, value.to(kept.dtype.element_ty), mask=(chosen > 0) & (place < BLOCK))
        count += tl.sum(chosen)
    return count


@triton.jit
def _limits(logits, vocab, best, kept, highest, rate, top_k, top_p, IDLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least logit that top-k and top-p keep, and the mass of the kept logits.

    `best` is each lane's largest logit. At least as many logits reach the bar as there are lanes whose largest reaches
    it: with `top_k` such lanes the k-th largest logit is not below the bar. For top-p alone half the lanes are a guess,
    which the mass above the bar can refute.
    """
    by_count = (top_k > 0) & (top_k < vocab)
    lanes = tl.arange(0, BLOCK)
    tl.store(kept + lanes, best.to(kept.dtype.element_ty))
    tl.debug_barrier()  # some threads of the program read what others stored
    reach = tl.minimum(tl.where(by_count, top_k, BLOCK // 2), BLOCK).to(tl.float32)
    bar, _ = _largest_reaching(kept, BLOCK, reach, tl.min(best), reach, highest, rate, True, IDLE, BLOCK)
    tl.debug_barrier()
    size = _thin(logits, vocab, bar, kept, BLOCK)
    tl.debug_barrier()

    source = logits
    bottom = tl.where(size >= top_k, bar, float("-inf"))
    if by_count:
        if (size >= top_k) & (size <= BLOCK):
            source = kept
        else:
            size = vocab
        goal = top_k.to(tl.float32)
        bottom, _ = _largest_reaching(source, size, goal, bottom, goal, highest, rate, True, IDLE, BLOCK)
        above = _mass(source, size, bottom, highest, rate, BLOCK)
        total = above
    else:
        total = _mass(logits, vocab, float("-inf"), highest, rate, BLOCK)
        above = _mass(kept, tl.minimum(size, BLOCK), float("-inf"), highest, rate, BLOCK)
        if (size <= BLOCK) & (above >= top_p * total):
            source = kept
        else:
            size = vocab
            bottom = tl.full([], float("-inf"), tl.float32)
            above = total
    if top_p < 1:
        goal = top_p * total
        bottom, above = _largest_reaching(source, size, goal, bottom, above, highest, rate, False, IDLE, BLOCK)
    return bottom, above


@triton.jit
def _draw_row(
    logits, stride, temperature, top_k, top_p, uniform, kept, out, vocab, IDLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Draw a token for program (row). `kept` [R, BLOCK] is for thinned rows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK):
        best = tl.maximum(best, _load(logits, start + lanes, vocab))
    highest = tl.max(best)

    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    rate = _LOG2_E / tl.maximum(heat, _GREEDY_BELOW)
    least = highest  # greedy sampling keeps only the largest and takes the first of them
    target = tl.full([], 0.0, tl.float32)
    if heat >= _GREEDY_BELOW:
        if ((k > 0) & (k < vocab)) | (p < 1):
            least, total = _limits(logits, vocab, best, kept + row * BLOCK, highest, rate, k, p, IDLE, BLOCK)
        else:
            least = tl.full([], float("-inf"), tl.float32)
            total = _mass(logits, vocab, float("-inf"), highest, rate, BLOCK)
        target = tl.load(uniform + row) * total

    # The first token at which the cumulative mass exceeds the target. If rounding has left none, the last kept token.
    token = _NOWHERE
    last = 0
    before = 0.0
    start = 0
    while (token == _NOWHERE) & (start < vocab):
        at = start + lanes
        value = _load(logits, at, vocab)
        mass = tl.where(value >= least, _weight(value, highest, rate, False), 0.0)
        last = tl.maximum(last, tl.max(tl.where(mass > 0, at, 0)))
        here = tl.sum(mass)
        if before + here > target:
            exceeds = (before + tl.cumsum(mass, axis=0) > target) & (mass > 0)
            token = tl.min(tl.where(exceeds, at, _NOWHERE))
        before += here
        start += BLOCK
    tl.store(out + row, tl.where(token == _NOWHERE, last, token))


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, out: Tensor) -> Tensor:
    """Write a token for each row of `logits` to `out`, and return `out`; `realengine.sampling.draw` in one launch.

    Args:
        logits: [R, V] without NaN, not all minus infinity; rows may lie further apart than V
        temperature: [R] fp32; under 1e-5 the first largest logit is taken
        top_k: [R] int32; every logit not below the k-th largest is kept, 0 is off
        top_p: [R] fp32; of the kept logits, every one not below the largest that `top_p` of the mass lies at or above
        uniform: [R] fp32 in [0, 1); the token is the first, in vocabulary order, at which the cumulative mass of the
            kept logits exceeds this share of it
        out: [R] int32

    Masses are fp32 sums. A row is read three times, or four with top-p alone. If thinning leaves too much of it, each
    pass of the bisection reads it once more.
    """
    rows, vocab = logits.shape
    block = _BLOCK[logits.dtype]
    kept = logits.new_empty(rows, block)
    _draw_row[(rows,)](
        logits, logits.stride(0), temperature, top_k, top_p, uniform, kept, out, vocab,
        _IDLE_BITS[logits.dtype], block, num_warps=16, num_stages=3,
    )  # fmt: skip
    return out


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for each dtype of logits."""
    number, integer = shaped(1, dtype=F32), shaped(1, dtype=I32)
    for dtype in _IDLE_BITS:
        launch = partial(draw, shaped(1, 151_936, dtype=dtype), number, integer, number, number, integer)
        yield Specialisation(f"draw {TRITON_NAME[dtype]}", _draw_row, launch, 128, ("ld.global.v4.b32",))
