"""One launch for the work between the QKV GEMM and attention: head norms, rotation, and writes to the KV cache.

A program handles some heads of one token. It normalises and rotates query and key heads, stores the queries for
attention, and stores keys and values in the token's slot. One program can have heads of all three kinds, so each kind
is stored with its own mask.
"""

from collections.abc import Iterator
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.launches import F32, I32, SHAPES, Specialisation, dependent_launch, shaped

_TILE_HEADS = 16
_FP8_MAX = tl.constexpr(448.0)  # largest e4m3 number; e4m3 has no infinity, so larger values are stored as this number


@triton.jit
def _load_heads(qkv, query_norm, key_norm, heads, dims, inside, inverse, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                DIM: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Return [heads, dims] of a token in fp32; if NORM, queries and keys are normalised with `inverse` and weights."""
    value = tl.load(qkv + heads[:, None] * DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        query_weight = tl.load(query_norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        key_weight = tl.load(key_norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        weight = tl.where((heads < HEADS)[:, None], query_weight[None, :], key_weight[None, :])
        value = tl.where((heads < HEADS + KV_HEADS)[:, None], value * inverse[:, None] * weight, value)
    return value


@triton.jit
def _cached(value, dtype: tl.constexpr):
    if dtype == tl.float8e4nv:
        value = tl.minimum(tl.maximum(value, -_FP8_MAX), _FP8_MAX)
    return value.to(dtype)


@triton.jit
def _rope_store(
    qkv,
    positions,
    slots,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    keys,
    values,
    key_factor,
    value_factor,
    queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run the program (token, tile of heads)."""
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, triton.next_power_of_2(DIM))
    inside = (heads < ALL)[:, None] & (dims < DIM)[None, :]
    qkv += token * ALL * DIM

    inverse = tl.full([TILE_HEADS], 1.0, tl.float32)
    if NORM:
        raw = tl.load(qkv + heads[:, None] * DIM + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(raw * raw, axis=1) / DIM + eps)
    # The other member of each dimension's pair is loaded separately, from the cache that the first load has filled.
    partner = dims ^ 1 if INTERLEAVED else (dims + HALF) % DIM
    angle = dims // 2 if INTERLEAVED else dims % HALF
    first = dims % 2 == 0 if INTERLEAVED else dims < HALF
    value = _load_heads(qkv, query_norm, key_norm, heads, dims, inside, inverse, HEADS, KV_HEADS, DIM, NORM)
    other = _load_heads(qkv, query_norm, key_norm, heads, partner, inside, inverse, HEADS, KV_HEADS, DIM, NORM)
    row = tl.load(positions + token).to(tl.int64) * HALF
    cosine = tl.load(cos + row + angle, mask=dims < DIM, other=0.0)
    sine = tl.load(sin + row + angle, mask=dims < DIM, other=0.0)
    rotated = value * cosine[None, :] + other * tl.where(first, -sine, sine)[None, :]

    is_query = inside & (heads < HEADS)[:, None]
    is_key = inside & ((heads >= HEADS) & (heads < HEADS + KV_HEADS))[:, None]
    is_value = inside & (heads >= HEADS + KV_HEADS)[:, None]
    places = (token * HEADS + heads)[:, None] * DIM + dims[None, :]
    tl.store(queries + places, rotated.to(queries.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + token).to(tl.int64)
    kv_head = (heads - HEADS) % KV_HEADS  # meaningless for queries, which are masked out
    cached = (slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE
    places = cached[:, None] * DIM + dims[None, :]
    tl.store(keys + places, _cached(rotated * key_factor, keys.dtype.element_ty), mask=is_key)
    tl.store(values + places, _cached(value * value_factor, values.dtype.element_ty), mask=is_value)


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    interleaved: bool,
    keys: Tensor,
    values: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalise and rotate the heads of `qkv`, store keys and values, and return the queries, [T, H, D].

    Args:
        qkv: [T, (H + 2 x KV heads) x D] contiguous: each token's query heads, key heads, value heads
        positions: [T] int32, rows of `cos` and `sin`
        slots: [T] int32 or int64, block x block size + offset; padding tokens share slots of the null block, whose
            content does not matter
        cos, sin: [maximum number of positions, D / 2] fp32
        query_norm: [D] weights of an RMSNorm over each query head, `key_norm` [D] over each key head; both or neither
        interleaved: dimensions 2i and 2i + 1 rotate together; otherwise i and i + D / 2
        keys: [blocks, KV heads, block size, D] contiguous, of any float dtype; `values` likewise
        k_scale: stored keys are keys / k_scale, clamped to ±448 in fp8; `v_scale` likewise

    The computation is in fp32 and rounds once.
    """
    _, kv_heads, page, dim = keys.shape
    tokens = len(qkv)
    heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty(tokens, heads, dim)
    _rope_store[(tokens, triton.cdiv(heads + 2 * kv_heads, _TILE_HEADS))](
        qkv, positions, slots, cos, sin,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm, eps,
        keys, values, 1 / k_scale, 1 / v_scale, queries,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page, NORM=query_norm is not None, INTERLEAVED=interleaved,
        TILE_HEADS=_TILE_HEADS,
        **dependent_launch(qkv.device), num_warps=4, num_stages=1,
    )  # fmt: skip
    return queries


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for every shape: with norms for Qwen3, and with interleaved pairs for SmolLM2."""
    for shape in SHAPES:
        norm = shaped(shape.dim, dtype=shape.dtype) if shape.model.startswith("Qwen3") else None
        cache = shaped(1, shape.kv_heads, shape.page, shape.dim, dtype=shape.cached)
        qkv = shaped(1, (shape.heads + 2 * shape.kv_heads) * shape.dim, dtype=shape.dtype)
        token, angles = shaped(1, dtype=I32), shaped(1, shape.dim // 2, dtype=F32)
        interleaved = shape.model.startswith("SmolLM2")
        launch = partial(rope_store, qkv, token, token, angles, angles, norm, norm, 1e-5, interleaved, cache, cache)
        expects = ("ld.global.v4.b32", "st.global", "griddepcontrol")
        yield Specialisation(f"rope_store {shape.name}", _rope_store, launch, 128, expects)
