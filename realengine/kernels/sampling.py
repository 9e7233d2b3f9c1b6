"""Kernels that choose tokens: greedy sampling, draws with temperature, top-k and top-p, and structured output's masks.

Greedy sampling splits the vocabulary among programs if there are few rows. A split stores its largest logit and the
index of this logit; a second launch takes the best of a row's splits.

For a draw, one program handles a row, without a sort and without the host. Top-k and top-p are both thresholds on the
logit. A threshold is found by bisection, with three pivots in each pass, on integers that have the same order as the
floats. A pass over the whole vocabulary is expensive. So a row is first thinned to the logits above a bar. The bar is
low enough to include the k-th largest logit; for top-p it is only likely to be low enough. The program checks whether
the thinned logits suffice, and if so, the bisection reads only these. Then the token is drawn in vocabulary order.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.launches import F32, I32, TRITON_NAME, Specialisation, shaped

_ARGMAX_BLOCK = 2048  # logits, one 16-byte load by each thread of 8 warps
_PROGRAMS = 512  # about four for each multiprocessor of an H100
_MAX_SPLITS = 64
_GREEDY_BELOW = tl.constexpr(1e-5)  # the temperature below which `tokentwin.realengine.sampling` is also greedy
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2147483647)
# Number of logits read at once, number of lanes of the first pass, and maximum number of logits that a row is thinned
# to; more would spill registers.
_DRAW_BLOCK = {torch.float32: 4096, torch.bfloat16: 8192, torch.float16: 8192}
# If a bf16 or fp16 number is converted to fp32, the low 16 or 13 bits of its image are constant, so bisection skips
# them.
_IDLE_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
_MASK_BLOCK = 1024  # tokens of a program, which reads 32 words of the mask and writes only forbidden logits


@triton.jit
def _first_largest(value, index):
    """Return the largest element of `value`, and the smallest `index` at which it occurs."""
    largest = tl.max(value, axis=0)
    return largest, tl.min(tl.where(value == largest, index, 2147483647), axis=0)


@triton.jit
def _argmax_split(logits, stride, largest, index, vocab, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest logit of program (row, split) in `largest` [R, SPLITS], and its position in `index`."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(vocab, BLOCK), SPLITS) * BLOCK
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = split * share + lanes
    for start in tl.range(split * share, tl.minimum(split * share + share, vocab), BLOCK):
        columns = start + lanes
        value = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        place = tl.where(value > best, columns, place)
        best = tl.maximum(best, value)
    value, first = _first_largest(best, place)
    if SPLITS > 1:
        tl.store(largest + row * SPLITS + split, value)
    tl.store(index + row * SPLITS + split, first)


@triton.jit
def _argmax_merge(largest, index, out, SPLITS: tl.constexpr):
    """Store the position of the largest logit among the splits of one row; the program's number is the row."""
    row = tl.program_id(0)
    splits = row * SPLITS + tl.arange(0, SPLITS)
    _, first = _first_largest(tl.load(largest + splits), tl.load(index + splits))
    tl.store(out + row, first)


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Write the index of each row's largest logit, or of the first of several, to `out`; return `out`.

    Args:
        logits: [R, V] without NaN; the stride between rows may exceed V
        out: [R] int32
    """
    rows, vocab = logits.shape
    splits = _splits(rows, vocab)
    index = out if splits == 1 else torch.empty(rows, splits, dtype=torch.int32, device=out.device)
    largest = torch.empty(rows, splits, dtype=torch.float32, device=out.device)
    _argmax_split[(rows, splits)](
        logits, logits.stride(0), largest, index, vocab, splits, _ARGMAX_BLOCK, num_warps=8, num_stages=3
    )
    if splits > 1:
        _argmax_merge[(rows,)](largest, index, out, splits, num_warps=1, num_stages=1)
    return out


def _splits(rows: int, vocab: int) -> int:
    """Return the number of splits: a power of two that fills the GPU and leaves each split a block of logits."""
    splits = 1
    while rows * splits < _PROGRAMS and 2 * splits <= min(triton.cdiv(vocab, _ARGMAX_BLOCK), _MAX_SPLITS):
        splits *= 2
    return splits


def _argmax_specialisations() -> Iterator[Specialisation]:
    """Yield the kernels for one row and for many."""
    for rows, dtype in [(1, torch.bfloat16), (64, torch.bfloat16), (1024, torch.bfloat16), (64, torch.float32)]:
        launch = partial(argmax, shaped(rows, 151_936, dtype=dtype), shaped(rows, dtype=I32))
        name = f"argmax {TRITON_NAME[dtype]}, {_splits(rows, 151_936)} splits"
        yield Specialisation(name, _argmax_split, launch, 64, ("ld.global.v4.b32",))
    launch = partial(argmax, shaped(1, 151_936), shaped(1, dtype=I32))
    yield Specialisation(f"argmax merge, {_MAX_SPLITS} splits", _argmax_merge, launch, 32, ())


@triton.jit
def _image(value, IDLE: tl.constexpr):
    """Return an integer (int64) for each fp32, in the same order as the floats, without its `IDLE` low bits."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> IDLE).to(tl.int64)


@triton.jit
def _value(image, IDLE: tl.constexpr):
    """Return the fp32 number of an image; this is the inverse of `_image`."""
    bits = (image << IDLE).to(tl.int32)
    negative = bits >> 31
    return ((bits | (negative & ((1 << IDLE) - 1))) ^ (negative & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(source, at, size):
    return tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(value, highest, rate, COUNT: tl.constexpr):
    """Return the weight of each logit: 1 if COUNT, else its probability relative to that of the likeliest token."""
    return tl.full(value.shape, 1.0, tl.float32) if COUNT else tl.exp2((value - highest) * rate)


@triton.jit
def _mass(source, size, least, highest, rate, BLOCK: tl.constexpr):
    """Return the sum of probabilities, relative to the highest, of the logits in `source` that are at least `least`."""
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
    """Return the largest t in [low, highest] for which the logits >= t have a total weight of at least `goal`.

    Also return this weight. `low` is such a t; its weight is `low_weight`. Each pass leaves a quarter of the
    candidates, so there are at most 16 passes for fp32, 10 for fp16 and 8 for bf16.
    """
    lanes = tl.arange(0, BLOCK)
    lower = _image(low, IDLE)  # the logits from here on reach the goal
    upper = _image(highest, IDLE) + 1  # the logits from here on do not reach the goal, or nothing is left to try
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
    """Copy the first BLOCK logits that are at least `bar` to `kept`; return the number of all that are."""
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
    """Return the smallest logit that top-k and top-p keep, and the mass (sum of weights) of the kept logits.

    `best` is the largest logit of each lane. If the largest logits of `top_k` lanes reach the bar, at least `top_k`
    logits do, so the k-th largest logit is not below the bar. For top-p alone the bar is a guess: half the lanes reach
    it. The program then checks whether the mass above the bar suffices.
    """
    by_count = (top_k > 0) & (top_k < vocab)
    lanes = tl.arange(0, BLOCK)
    tl.store(kept + lanes, best.to(kept.dtype.element_ty))
    tl.debug_barrier()  # threads of the program read logits that other threads stored
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
    """Draw a token for one row; the program's number is the row. `kept` [R, BLOCK] is memory for thinned rows."""
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
    least = highest  # greedy sampling keeps only the largest logits and takes the first of them
    target = tl.full([], 0.0, tl.float32)
    if heat >= _GREEDY_BELOW:
        if ((k > 0) & (k < vocab)) | (p < 1):
            least, total = _limits(logits, vocab, best, kept + row * BLOCK, highest, rate, k, p, IDLE, BLOCK)
        else:
            least = tl.full([], float("-inf"), tl.float32)
            total = _mass(logits, vocab, float("-inf"), highest, rate, BLOCK)
        target = tl.load(uniform + row) * total

    # Take the first token at which the cumulative mass exceeds the target. If there is none because of rounding, take
    # the last kept token.
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
        logits: [R, V] without NaN, not all minus infinity in a row; the stride between rows may exceed V
        temperature: [R] fp32; under 1e-5 the first largest logit is taken
        top_k: [R] int32; every logit not below the k-th largest is kept; 0 keeps all
        top_p: [R] fp32; of the logits that top-k keeps, those that reach a threshold are kept. It is the largest
            threshold for which they have at least the share `top_p` of the mass
        uniform: [R] fp32 in [0, 1); the token is the first, in vocabulary order, at which the cumulative mass of the
            kept logits exceeds this share of their total mass
        out: [R] int32

    Masses are fp32 sums. A row is read three times, or four times with top-p alone. If the thinned logits do not
    suffice, each pass of the bisection reads the whole row once more.
    """
    rows, vocab = logits.shape
    block = _DRAW_BLOCK[logits.dtype]
    kept = logits.new_empty(rows, block)
    _draw_row[(rows,)](
        logits, logits.stride(0), temperature, top_k, top_p, uniform, kept, out, vocab,
        _IDLE_BITS[logits.dtype], block, num_warps=16, num_stages=3,
    )  # fmt: skip
    return out


def _draw_specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for each dtype of logits."""
    number, integer = shaped(1, dtype=F32), shaped(1, dtype=I32)
    for dtype in _IDLE_BITS:
        launch = partial(draw, shaped(1, 151_936, dtype=dtype), number, integer, number, number, integer)
        yield Specialisation(f"draw {TRITON_NAME[dtype]}", _draw_row, launch, 128, ("ld.global.v4.b32",))


@triton.jit
def _token_mask(logits, stride, samples, bits, words, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    sample = tl.load(samples + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    word = tl.load(bits + row.to(tl.int64) * words + tokens // 32, mask=inside, other=-1)
    forbidden = (word >> (tokens % 32)) & 1 == 0
    tl.store(logits + sample * stride + tokens, float("-inf"), mask=inside & forbidden)


def token_mask(logits: Tensor, samples: Tensor, bits: Tensor) -> None:
    """Set the logits of forbidden tokens to -inf in the rows `samples` of `logits` [S, V].

    In row `samples[i]`, token t is allowed if bit t % 32 of `bits[i, t // 32]` is 1. `samples` is int32 [M], `bits` is
    int32 [M, W].
    """
    rows, words = bits.shape
    vocab = logits.shape[1]
    grid = (rows, triton.cdiv(vocab, _MASK_BLOCK))
    _token_mask[grid](logits, logits.stride(0), samples, bits, words, vocab, _MASK_BLOCK, num_warps=4, num_stages=1)


def _mask_specialisations() -> Iterator[Specialisation]:
    launch = partial(token_mask, shaped(1, 151_936), shaped(1, dtype=I32), shaped(1, 4748, dtype=I32))
    yield Specialisation("token_mask bf16", _token_mask, launch, 64, ("st.global",))


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels of greedy sampling, of draws and of masks."""
    yield from _argmax_specialisations()
    yield from _draw_specialisations()
    yield from _mask_specialisations()
