"""The correct results of kernels, computed from definitions in float64, and the distance of a result from them."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.gpu_suite.ragged_batch import Draw
from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.models.layer_ops import HeadNorms, Rope
from tokentwin.realengine.step_input import Batch


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return the larger of ||out - expected|| / ||expected|| and max |out - expected| / max |expected|, or NaN."""
    difference = out.double() - expected.double()
    norm, worst = difference.norm() / expected.norm(), difference.abs().max() / expected.abs().max()
    return float(torch.stack([norm, worst]).max())


def attended(queries: Tensor, kv: LayerKv, batch: Batch, page: int, window: int = 0) -> Tensor:
    """Return softmax(q K^T / sqrt(D)) V of every token, `[T, heads, D]`; a token sees `window` tokens, or all if 0."""
    heads, dim = queries.shape[1:]
    out = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    names = ("query_start", "query_len", "context", "table_start")
    for first, count, context, start in zip(*(batch.on_host(name) for name in names), strict=True):
        at = torch.arange(context, device=queries.device)
        block = batch.blocks[start + at // page].long()
        keys, values = (cache.float()[block, :, at % page].double() for cache in kv[:2])  # [context, KV heads, D]
        group = heads // keys.shape[1]
        query = queries[first : first + count].double().unflatten(1, (-1, group))
        scores = torch.einsum("tkgd,ckd->kgtc", query, keys) * dim**-0.5
        position = torch.arange(context - count, context, device=queries.device)
        before = position[:, None] - at[None, :]
        scores.masked_fill_((before < 0) | (before >= (window or context)), -torch.inf)
        out[first : first + count] = torch.einsum("kgtc,ckd->tkgd", scores.softmax(-1), values).flatten(1, 2)
    return out


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(
    qkv: Tensor, rope: Rope, positions: Tensor, norms: HeadNorms | None, eps: float, heads: int, kv_heads: int
) -> list[Tensor]:
    """Return queries, keys and values `[T, heads, D]` of `qkv`: heads normalised, each pair turned by its angle."""
    parts = list(qkv.double().split([heads, kv_heads, kv_heads], dim=1))
    turn = torch.complex(rope.cos.double(), rope.sin.double())[positions.long()][:, None]
    for index in range(2):
        if norms is not None:
            parts[index] = normalised(parts[index], norms[index].double(), eps)
        first, second = (
            (parts[index][..., 0::2], parts[index][..., 1::2]) if rope.interleaved else parts[index].chunk(2, dim=-1)
        )
        turned = torch.complex(first, second) * turn
        pair = (turned.real, turned.imag)
        parts[index] = torch.stack(pair, dim=-1).flatten(-2) if rope.interleaved else torch.cat(pair, dim=-1)
    return parts


def distance_from_draw(logits: Tensor, how: Draw, token: int) -> float:
    """Return the distance of the random number from the part of the cumulative probability that belongs to `token`.

    `logits` is one row. The distance is infinite if top-k or top-p drops the token. Tokens with the same logit as the
    last kept token are kept, too.
    """
    temperature, top_k, top_p, uniform = how
    wide = logits.double()
    if temperature == 0:
        return 0.0 if token == int((wide == wide.max()).nonzero()[0]) else float("inf")
    scaled = (wide - wide.max()) / temperature
    if 0 < top_k < len(scaled):
        scaled = torch.where(scaled >= scaled.sort(descending=True).values[top_k - 1], scaled, -torch.inf)
    mass = torch.softmax(scaled, dim=0)
    if top_p < 1:
        ordered = mass.sort(descending=True).values
        reached = ordered[int((ordered.cumsum(0) < top_p).sum().clamp(max=len(mass) - 1))]
        mass = torch.where(mass >= reached, mass, 0.0)
    mass = mass / mass.sum()
    if not 0 <= token < len(mass) or not mass[token] > 0:
        return float("inf")
    end = float(mass.cumsum(0)[token])
    return max(0.0, end - float(mass[token]) - uniform, uniform - end)
