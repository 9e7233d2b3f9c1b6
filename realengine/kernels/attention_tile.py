"""One tile of attention: some query rows of one KV head attend to the next keys and values of a paged cache.

Both decode and prefill go through a row's KV in such steps, which keep the running maximum and sum of an online softmax
(Milakov and Gimelshein 2018; FlashAttention-2). Scores are in units of log2, so that exp2 replaces exp. Tokens are
gathered one by one through the block table, so that the width of a tile does not depend on the cache's page size. Tests
use fp32 inputs, whose products the tensor cores compute as three TF32 products; this does not affect 16-bit inputs.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-3.0e38)  # initial maximum: finite, because -inf minus -inf would be NaN


@triton.jit
def load_heads(pointer, token, head, dims, stride, present, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Return [rows, dims] of a [tokens, heads, DIM] tensor whose tokens lie `stride` apart; 0 where not `present`."""
    offsets = token.to(tl.int64)[:, None] * stride + head[:, None] * DIM + dims[None, :]
    return tl.load(pointer + offsets, mask=present[:, None] & (dims[None, :] < DIM), other=0.0).to(COMPUTE)


@triton.jit
def _load_cached(pointer, offsets, present, dims, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Return a tile of keys or values, with a mask only if needed, because it costs registers and instructions."""
    if MASKED:
        return tl.load(pointer + offsets, mask=present[:, None] & (dims[None, :] < DIM), other=0.0)
    if dims.shape[0] == DIM:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=dims[None, :] < DIM, other=0.0)


@triton.jit
def attend_tile(
    query,
    weighted,
    total,
    highest,
    keys,
    values,
    table,
    first,
    visible,
    context,
    kv_head,
    dims,
    scale_log2,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    """Attend to tokens `first` to `first + BLOCK_N` of a row, and return the new (weighted, total, highest).

    Args:
        query: [M, dims], zeros beyond DIM
        weighted: [M, dims] fp32, sum over the values seen so far of value times exp2(score - highest)
        total: [M] fp32, sum of the weights exp2(score - highest)
        highest: [M] fp32, the highest score so far
        table: pointer to the row's block ids
        visible: [M] number of tokens, from the row's first, that each query may see; read only if MASKED
        context: number of KV tokens of the row, used only if MASKED; slots beyond them are then not read
        WINDOW: number of the last visible tokens that a query sees, used only if MASKED; 0 means all
    """
    positions = first + tl.arange(0, BLOCK_N)
    inside = positions < context
    block = tl.load(table + positions // PAGE, mask=inside, other=0) if MASKED else tl.load(table + positions // PAGE)
    slots = (block.to(tl.int64) * KV_HEADS + kv_head) * PAGE + positions % PAGE
    offsets = slots[:, None] * DIM + dims[None, :]

    key = _load_cached(keys, offsets, inside, dims, DIM, MASKED).to(COMPUTE)
    scores = tl.dot(query, key.T, input_precision="tf32x3") * scale_log2
    if MASKED:
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(positions[None, :] >= visible[:, None] - WINDOW, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    total = total * decay + tl.sum(weights, axis=1)
    weighted = weighted * decay[:, None]
    value = _load_cached(values, offsets, inside, dims, DIM, MASKED).to(COMPUTE)
    weighted = tl.dot(weights.to(COMPUTE), value, weighted, input_precision="tf32x3")
    return weighted, total, new_highest
