"""Greedy sampling: each row's first largest logit, with the vocabulary split among programs when rows are few.

A split stores its largest logit and that logit's place; a second launch takes the best of a row's splits.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import I32, TRITON_NAME, shaped
from realengine.kernels.specialisation import Specialisation

_BLOCK = 2048  # logits, one 16-byte load by each thread of 8 warps
_PROGRAMS = 512  # about four for each multiprocessor of an H100
_MAX_SPLITS = 64


@triton.jit
def _first_largest(value, index):
    """Return the largest of `value`, and the least `index` that has it."""
    largest = tl.max(value, axis=0)
    return largest, tl.min(tl.where(value == largest, index, 2147483647), axis=0)


@triton.jit
def _argmax_split(logits, stride, largest, index, vocab, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest logit of program (row, split) in `largest` [R, SPLITS] and its place in `index`."""
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
    """Store the place of the largest of the splits' logits, for program (row)."""
    row = tl.program_id(0)
    splits = row * SPLITS + tl.arange(0, SPLITS)
    _, first = _first_largest(tl.load(largest + splits), tl.load(index + splits))
    tl.store(out + row, first)


def argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Write the index of each row's largest logit, the first if there are several, to `out`, and return `out`.

    Args:
        logits: [R, V] without NaN; rows may lie further apart than V
        out: [R] int32
    """
    rows, vocab = logits.shape
    splits = _splits(rows, vocab)
    index = out if splits == 1 else torch.empty(rows, splits, dtype=torch.int32, device=out.device)
    largest = torch.empty(rows, splits, dtype=torch.float32, device=out.device)
    _argmax_split[(rows, splits)](
        logits, logits.stride(0), largest, index, vocab, splits, _BLOCK, num_warps=8, num_stages=3
    )
    if splits > 1:
        _argmax_merge[(rows,)](largest, index, out, splits, num_warps=1, num_stages=1)
    return out


def _splits(rows: int, vocab: int) -> int:
    """Return a power of two that gives the GPU enough programs, each with a block of the vocabulary to read."""
    splits = 1
    while rows * splits < _PROGRAMS and 2 * splits <= min(triton.cdiv(vocab, _BLOCK), _MAX_SPLITS):
        splits *= 2
    return splits


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels for one row and for many."""
    for rows, dtype in [(1, torch.bfloat16), (64, torch.bfloat16), (1024, torch.bfloat16), (64, torch.float32)]:
        launch = partial(argmax, shaped(rows, 151_936, dtype=dtype), shaped(rows, dtype=I32))
        name = f"argmax {TRITON_NAME[dtype]}, {_splits(rows, 151_936)} splits"
        yield Specialisation(name, _argmax_split, launch, 64, ("ld.global.v4.b32",))
    launch = partial(argmax, shaped(1, 151_936), shaped(1, dtype=I32))
    yield Specialisation(f"argmax merge, {_MAX_SPLITS} splits", _argmax_merge, launch, 32, ())
