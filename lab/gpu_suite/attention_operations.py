"""Operations on a paged KV cache, as they are checked and timed: see `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.gpu_suite.operations import LIMIT, NAME, Cost, On, Operation, Outputs, Prepared
from lab.gpu_suite.ragged_batch import (
    Numbers,
    Row,
    backend_for,
    batch_of,
    context_slots,
    layer_spec,
    outside_is_nan,
    pool_blocks,
    random_cache,
)
from lab.gpu_suite.references import attended, relative_error, rotated
from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.kernels.launches import Shape
from tokentwin.realengine.models.layer_ops import HeadNorms, Rope
from tokentwin.realengine.step_input import Batch
from tokentwin.serving.deployments.model_spec import ModelSpec

_LONGEST = 8192  # tokens of a context


def attention(
    on: On, shape: Shape, rows: Sequence[Row], longest: int = _LONGEST, whole: bool = False, checked: bool = False
) -> Operation:
    """Return attention of `rows` of (context, query tokens): decode if every row has one query token, else prefill.

    A prefill row also attends to cached tokens if its context is longer than its query tokens. With `whole`, KV is not
    divided among programs, as in the batch-invariant mode. With `checked`, planning is part of the call, and the cache
    is NaN outside the contexts.

    Attention is causal: a row of n query tokens after c cached tokens has n * (2c + n + 1) / 2 query-key pairs. Each
    pair takes a product with a key and one with a value. The cost leaves out the reading of block ids.
    """

    def prepare() -> Prepared:
        made = backend_for(on.backend, layer_spec(shape), shape.page, on.device, longest, whole)
        attention = on.with_settings(made.attention)
        batch = batch_of(rows, shape.page, attention, on.device)
        attention.prepare(batch, False)
        plan = None if checked else attention.plan(batch, shape.window)

        def make(seed: int) -> tuple[Any, ...]:
            return _paged(on, shape, rows, batch, seed, checked)

        def call(queries: Tensor, kv: LayerKv) -> Outputs:
            return (attention.attend(queries, attention.plan(batch, shape.window) if checked else plan, kv),)

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            queries, kv = given
            return relative_error(out[0], attended(queries, kv, batch, shape.page, shape.window))

        return Prepared(make, call, error)

    tokens, contexts = sum(count for _, count in rows), [context for context, _ in rows]
    pairs = sum(count * (2 * context - count + 1) // 2 for context, count in rows)
    cached = 2 * sum(contexts) * shape.kv_heads * shape.dim * shape.cached.itemsize
    width = shape.heads * shape.dim
    kind = "decode" if tokens == len(rows) else "prefill"
    kept = {"context": sum(contexts) // len(rows), "longest": max(contexts), "kv_dtype": NAME[shape.cached]}
    about = on.about(tokens, width, width, rows=len(rows), part="whole" if whole else "", **kept)
    about["op"] = f"attention_{kind}"
    case = f"{shape.name}: {len(rows)} rows, {tokens} tokens"
    cost = Cost(cached + 2 * 2 * tokens * width, 4 * pairs * width)
    return Operation(f"paged_{kind}", case, shape.dtype, LIMIT[shape.dtype], prepare, cost, about)


def invariance(on: On, shape: Shape, rows: Sequence[Row]) -> Operation:
    """Return a check of the batch-invariant mode: a decode row must give the same bits alone as among other rows."""

    def prepare() -> Prepared:
        attention = backend_for(on.backend, layer_spec(shape), shape.page, on.device, _LONGEST, True).attention
        batch = batch_of(rows, shape.page, attention, on.device)
        starts, contexts = batch.on_host("table_start"), batch.on_host("context")
        assert batch.host is not None
        table = batch.host[batch.layout.places()["blocks"]]

        def alone(row: int, queries: Tensor, kv: LayerKv) -> Tensor:
            single = batch_of([rows[row]], shape.page, attention, on.device)
            need = -(-contexts[row] // shape.page)
            single.blocks[:need] = torch.from_numpy(table[starts[row] : starts[row] + need]).to(on.device)
            padded = single.layout.tokens
            return attention.attend(queries[[row] * padded], attention.plan(single, shape.window), kv)[0]

        def call(queries: Tensor, kv: LayerKv) -> Outputs:
            whole = attention.attend(queries, attention.plan(batch, shape.window), kv)[: len(rows)]
            return whole, torch.stack([alone(row, queries, kv) for row in range(len(rows))])

        def make(seed: int) -> tuple[Any, ...]:
            return _paged(on, shape, rows, batch, seed, checked=True)

        return Prepared(make, call, lambda given, out: float((out[0] != out[1]).sum()))

    return Operation("paged_decode", f"{shape.name}: batch-invariant", shape.dtype, 0.0, prepare)


def rope_store(on: On, shape: Shape, spec: ModelSpec, rows: Sequence[Row]) -> Operation:
    """Return head norms, rotation and the write to the cache.

    The error covers the queries, the written keys and values, and writes to any other place of the cache. The cost
    counts QKV twice (read and written) and, for each token, float32 cosines and sines, a position and a slot.
    """
    heads = (shape.heads, shape.kv_heads)

    def prepare() -> Prepared:
        attention, ops = backend_for(on.backend, spec, shape.page, on.device, _LONGEST)
        batch = batch_of(rows, shape.page, attention, on.device)
        rope = Rope(spec, max(context for context, _ in rows), on.device)
        rotation = ops.rotation(rope, batch)
        size = (2, pool_blocks(rows, shape.page), shape.kv_heads, shape.page, shape.dim)

        def make(seed: int) -> tuple[Any, ...]:
            numbers = Numbers(on.device, seed)
            qkv = numbers(batch.layout.tokens, heads[0] + 2 * heads[1], shape.dim, dtype=shape.dtype, scale=2)
            # All padded tokens share a slot, and any of them may write last, so all of them repeat the first token.
            qkv = torch.where((batch.slots == 0)[:, None, None], qkv[:1], qkv)
            norms = HeadNorms(*numbers(2, shape.dim, dtype=shape.dtype)) if spec.qk_norm else None
            return qkv, norms, LayerKv(*torch.full(size, torch.nan, device=on.device).to(shape.cached))

        def call(qkv: Tensor, norms: HeadNorms | None, kv: LayerKv) -> Outputs:
            return ops.rope_store(qkv.flatten(1), rotation, norms, kv, batch), *kv[:2]

        def error(given: tuple[Any, ...], out: Outputs) -> float:
            qkv, norms, _ = given
            expected = rotated(qkv, rope, batch.positions, norms, spec.norm_eps, *heads)
            worst = relative_error(out[0], expected[0])
            slack = LIMIT[shape.dtype] / LIMIT[shape.cached]  # rounding to fp8 alone exceeds the limit of the case
            slots = batch.slots.long()
            for cache, wanted in zip(out[1:], expected[1:], strict=True):
                stored = cache.double().transpose(1, 2).flatten(0, 1)
                worst = max(worst, slack * relative_error(stored[slots], wanted))
                stored[slots] = torch.nan
                if not bool(stored.isnan().all()):
                    return float("inf")
            return worst

        return Prepared(make, call, error)

    kind = "head norms" if spec.qk_norm else "no norms"
    kind += ", interleaved" if spec.rope_interleaved else ", halves"
    tokens, merged = sum(count for _, count in rows), (heads[0] + 2 * heads[1]) * shape.dim
    norms = 2 * 2 * shape.dim if spec.qk_norm else 0
    cost = Cost(tokens * (2 * 2 * merged + 4 * shape.dim + 8) + norms)
    about = on.about(tokens, merged, merged, rows=len(rows), kv_dtype=NAME[shape.cached])
    case = f"{shape.name}: {kind}"
    return Operation("rope_store", case, shape.dtype, LIMIT[shape.dtype], prepare, cost, about)


def _paged(on: On, shape: Shape, rows: Sequence[Row], batch: Batch, seed: int, checked: bool) -> tuple[Tensor, LayerKv]:
    """Return queries, as a part of merged QKV, and a cache, which is NaN outside the contexts if `checked`."""
    numbers = Numbers(on.device, seed)
    cache = random_cache(shape, pool_blocks(rows, shape.page), numbers)
    merged = numbers(batch.layout.tokens, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=shape.dtype)
    return merged[:, : shape.heads], outside_is_nan(cache, context_slots(batch, shape.page)) if checked else cache
