"""What each kernel is checked on: random inputs of one size, the call, and how far its answer is from float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realengine.gpu_suite.expert_batch import ExpertBatch, Mixture
from realengine.gpu_suite.packing import Packing
from realengine.gpu_suite.ragged_batch import (
    Draw,
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
from realengine.gpu_suite.references import attended, distance_from_draw, normalised, relative_error, rotated
from realengine.kernels.attention_shapes import Shape
from realengine.kv_cache import LayerKv
from realengine.layer_ops import HeadNorms, LayerOps
from realengine.projection import Fp8Rows
from realengine.rope import Rope
from realengine.step_input import Batch

_FP8 = torch.float8_e4m3fn
LIMIT = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    _FP8: 0.07,
}  # of `relative_error`: a few roundings, of fp8 one
_DRAW_LIMIT = 1e-4  # of the cumulative mass: sums of 150,000 float32 numbers
_EPS = 1e-5

Outputs = tuple[Tensor, ...]
Prepared = tuple[Callable[[], Outputs], Callable[[Outputs], float]]  # runs the kernel; the error of what it gave


class Case(NamedTuple):
    """`prepare` makes the inputs. An error above `limit` is a fault."""

    kernel: str
    case: str
    dtype: torch.dtype
    limit: float
    prepare: Callable[[], Prepared]


def attention_case(
    kernel: str, backend: str, shape: Shape, rows: Sequence[Row], device: torch.device, seed: int, longest: int
) -> Case:
    """`rows` are (context, query tokens); with one token they are for the decode kernel."""

    def prepare() -> Prepared:
        attention = backend_for(backend, layer_spec(shape), shape.page, device, longest).attention
        batch, kv, queries = _paged(shape, rows, attention, device, seed)
        return (
            lambda: (attention.attend(queries, attention.plan(batch, shape.window), kv),),
            lambda out: relative_error(out[0], attended(queries, kv, batch, shape.page, shape.window)),
        )

    tokens = sum(count for _, count in rows)
    return Case(kernel, f"{shape.name}: {len(rows)} rows, {tokens} tokens", shape.dtype, LIMIT[shape.dtype], prepare)


def invariance_case(backend: str, shape: Shape, rows: Sequence[Row], device: torch.device, seed: int) -> Case:
    """In the batch-invariant mode a decode row gives the same bits alone as among others."""

    def prepare() -> Prepared:
        attention = backend_for(backend, layer_spec(shape), shape.page, device, 8192, batch_invariant=True).attention
        batch, kv, queries = _paged(shape, rows, attention, device, seed)
        starts, contexts = batch.on_host("table_start"), batch.on_host("context")
        assert batch.host is not None
        table = batch.host[batch.layout.places()["blocks"]]

        def alone(row: int) -> Tensor:
            single = batch_of([rows[row]], shape.page, attention, device)
            need = -(-contexts[row] // shape.page)
            single.blocks[:need] = torch.from_numpy(table[starts[row] : starts[row] + need]).to(device)
            padded = single.layout.tokens
            return attention.attend(queries[[row] * padded], attention.plan(single, shape.window), kv)[0]

        def run() -> Outputs:
            whole = attention.attend(queries, attention.plan(batch, shape.window), kv)[: len(rows)]
            return whole, torch.stack([alone(row) for row in range(len(rows))])

        return run, lambda out: float((out[0] != out[1]).sum())

    return Case("paged_decode", f"{shape.name}: batch-invariant", shape.dtype, 0.0, prepare)


def rope_case(
    backend: str, shape: Shape, norms: bool, interleaved: bool, rows: Sequence[Row], device: torch.device
) -> Case:
    """Queries as returned, keys and values as the cache has them, and nothing else in the cache."""

    def prepare() -> Prepared:
        spec = layer_spec(shape, norms, interleaved)
        attention, ops = backend_for(backend, spec, shape.page, device, 8192)
        batch = batch_of(rows, shape.page, attention, device)
        numbers = Numbers(device, seed=1)
        rope = Rope(spec, max(context for context, _ in rows), device)
        heads = (shape.heads, shape.kv_heads)
        qkv = numbers(batch.layout.tokens, heads[0] + 2 * heads[1], shape.dim, dtype=shape.dtype, scale=2)
        # Padding shares a slot, and any of it may be the last to write: all of it is the first token's.
        qkv = torch.where((batch.slots == 0)[:, None, None], qkv[:1], qkv)
        weights = numbers(2, shape.dim, dtype=shape.dtype)
        head_norms = HeadNorms(*weights) if norms else None
        size = (2, pool_blocks(rows, shape.page), shape.kv_heads, shape.page, shape.dim)

        def run() -> Outputs:
            kv = LayerKv(*torch.full(size, torch.nan, device=device).to(shape.cached))
            queries = ops.rope_store(qkv.flatten(1), ops.rotation(rope, batch), head_norms, kv, batch)
            return queries, *kv[:2]

        def error_of(out: Outputs) -> float:
            expected = rotated(qkv, rope, batch.positions, head_norms, spec.norm_eps, *heads)
            worst = relative_error(out[0], expected[0])
            slack = LIMIT[shape.dtype] / LIMIT[shape.cached]  # fp8 rounds more coarsely than the limit of the case
            slots = batch.slots.long()
            for cache, wanted in zip(out[1:], expected[1:], strict=True):
                stored = cache.double().transpose(1, 2).flatten(0, 1)
                worst = max(worst, slack * relative_error(stored[slots], wanted))
                stored[slots] = torch.nan
                if not bool(stored.isnan().all()):
                    return float("inf")
            return worst

        return run, error_of

    kind = f"{'head norms' if norms else 'no norms'}, {'interleaved' if interleaved else 'halves'}"
    return Case("rope_store", f"{shape.name}: {kind}", shape.dtype, LIMIT[shape.dtype], prepare)


def norm_case(
    backend: str, tokens: int, size: int, dtype: torch.dtype, add: bool, device: torch.device, fp8: bool = False
) -> Case:
    """The norm, and with `add` the residual, which must be the rounded sum; with `fp8` as e4m3 rows."""

    def prepare() -> Prepared:
        numbers = Numbers(device, tokens + size)
        x, residual = numbers(2, tokens, size, dtype=dtype, scale=3)
        weight = numbers(size, dtype=dtype)
        ops = _ops(backend, dtype, device)

        def run() -> Outputs:
            kept = residual.clone()
            return *_parts(ops.add_norm(x.clone(), kept if add else None, weight, fp8)), kept if add else x

        def error_of(out: Outputs) -> float:
            summed = (x.double() + residual.double()).to(dtype) if add else x
            normed = relative_error(_whole(out[:-1]), normalised(out[-1].double(), weight.double(), _EPS))
            return max(normed, relative_error(out[-1], summed.double()))

        return run, error_of

    what = f"{tokens} x {size}{'' if add else ', no residual'}{', to fp8' if fp8 else ''}"
    return Case("add_rms_norm", what, dtype, LIMIT[_FP8 if fp8 else dtype], prepare)


def silu_case(
    backend: str, tokens: int, size: int, dtype: torch.dtype, device: torch.device, fp8: bool = False
) -> Case:
    """SwiGLU's product of `[tokens, 2 * size]`; with `fp8` as e4m3 rows."""

    def prepare() -> Prepared:
        gate_up = Numbers(device, tokens + size)(tokens, 2 * size, dtype=dtype, scale=4)
        ops = _ops(backend, dtype, device)

        def error_of(out: Outputs) -> float:
            gate, up = gate_up.double().chunk(2, dim=1)
            return relative_error(_whole(out), gate / (1 + (-gate).exp()) * up)

        return lambda: _parts(ops.silu_mul(gate_up, fp8)), error_of

    what = f"{tokens} x {size}{', to fp8' if fp8 else ''}"
    return Case("silu_mul", what, dtype, LIMIT[_FP8 if fp8 else dtype], prepare)


def packed_case(backend: str, packing: Packing, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Tokens by weights of 4 or 8 bits."""

    def prepare() -> Prepared:
        numbers = Numbers(device, tokens)
        weight, x = packing.weight(numbers, dtype), numbers(tokens, packing.inputs, dtype=dtype)
        projection = _ops(backend, dtype, device).packed(weight, dtype, None)
        return lambda: (projection(x),), lambda out: relative_error(out[0], x.double() @ packing.dense(weight).T)

    return Case("packed_gemm", f"{tokens} tokens, {packing}", dtype, LIMIT[dtype], prepare)


def experts_case(backend: str, mixture: Mixture, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Tokens through experts, some of which are another rank's."""

    def prepare() -> Prepared:
        numbers, ops = Numbers(device, tokens), _ops(backend, dtype, device)
        batch = ExpertBatch(mixture, tokens, dtype, numbers, ops, others=mixture.experts // 5)
        return lambda: (batch.run(),), lambda out: relative_error(out[0], batch.expected())

    return Case("grouped_gemm", f"{tokens} tokens, {mixture}", dtype, LIMIT[dtype], prepare)


def argmax_case(backend: str, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Case:
    """How many rows have another token than the first largest; the first row's largest is there twice."""

    def prepare() -> Prepared:
        logits, sample = _sampler(backend, [None] * rows, vocab, dtype, device)
        logits[0, -1] = logits[0, vocab // 2] = 9.0

        def error_of(out: Outputs) -> float:
            places = torch.arange(vocab, device=device)
            largest = logits == logits.max(dim=1, keepdim=True).values
            return float((out[0] != torch.where(largest, places, vocab).amin(dim=1)).sum())

        return lambda: (sample(True),), error_of

    return Case("argmax", f"{rows} x {vocab}", dtype, 0.0, prepare)


def mask_case(backend: str, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Case:
    """How many logits are not what the masks of every second row leave."""

    def prepare() -> Prepared:
        numbers = Numbers(device, vocab)
        logits = numbers(rows, vocab, dtype=dtype)
        samples = torch.arange(0, rows, 2, dtype=torch.int32, device=device)
        bits = numbers(len(samples), -(-vocab // 32), dtype=torch.float32, scale=1e9).to(torch.int32)
        ops = _ops(backend, dtype, device)

        def run() -> Outputs:
            masked = logits.clone()
            ops.mask(masked, samples, bits)
            return (masked,)

        def error_of(out: Outputs) -> float:
            allowed = (bits[..., None] >> torch.arange(32, device=device) & 1).flatten(1)[:, :vocab] == 1
            wanted = logits.clone()
            wanted[::2] = torch.where(allowed, logits[::2], -torch.inf)
            return float((out[0] != wanted).sum())

        return run, error_of

    return Case("token_mask", f"{rows} x {vocab}", dtype, 0.0, prepare)


def draw_case(backend: str, rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Case:
    """The largest distance of a row's uniform number from the cumulative mass of the token drawn."""

    def prepare() -> Prepared:
        kinds = [(0.0, 5, 0.5), (1.0, 0, 1.0), (0.7, 1, 1.0), (1.3, 50, 1.0), (1.0, 0, 0.9), (0.8, 40, 0.95),
                 (2.0, 0, 1e-6), (1.0, 9000, 0.5)]  # fmt: skip
        hot = [kinds[(3 + index) % len(kinds)] for index in range(rows)]
        numbers = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).tolist()
        hows: list[Draw] = [(*how, number) for how, number in zip(hot, numbers, strict=True)]
        logits, sample = _sampler(backend, hows, vocab, dtype, device)
        logits[:, vocab // 7 : vocab // 5] = -torch.inf

        def error_of(out: Outputs) -> float:
            tokens = out[0].tolist()
            return max(
                distance_from_draw(row, how, token) for row, how, token in zip(logits, hows, tokens, strict=False)
            )

        return lambda: (sample(False),), error_of

    return Case("draw", f"{rows} x {vocab}", dtype, _DRAW_LIMIT, prepare)


# How


def _parts(found: Tensor | Fp8Rows) -> Outputs:
    return (found.rows, found.scale) if isinstance(found, Fp8Rows) else (found,)


def _whole(parts: Outputs) -> Tensor:
    """What `_parts` were of, in float64."""
    return parts[0].double() * parts[1] if len(parts) > 1 else parts[0].double()


def _paged(
    shape: Shape, rows: Sequence[Row], attention: Any, device: torch.device, seed: int
) -> tuple[Batch, LayerKv, Tensor]:
    """A batch, a cache that is NaN outside its contexts, and queries that lie in a merged QKV."""
    batch = batch_of(rows, shape.page, attention, device, seed)
    numbers = Numbers(device, seed)
    cache = random_cache(shape, pool_blocks(rows, shape.page), numbers)
    merged = numbers(batch.layout.tokens, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=shape.dtype)
    return batch, outside_is_nan(cache, context_slots(batch, shape.page)), merged[:, : shape.heads]


def _ops(backend: str, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """The small operations, which heads are nothing to."""
    spec = layer_spec(Shape("any", 1, 1, 64, dtype, dtype, 16)).model_copy(update={"norm_eps": _EPS})
    return backend_for(backend, spec, 16, device, 128).ops


def _sampler(
    backend: str, draws: Sequence[Draw | None], vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Callable[[bool], Tensor]]:
    """Logits of one row for each draw, and of padding rows, and what samples them, greedily or not."""
    attention, ops = backend_for(backend, layer_spec(Shape("sample", 1, 1, 64, dtype, dtype, 16)), 16, device, 128)
    batch = batch_of([(1, 1)] * len(draws), 16, attention, device, draws=draws)
    logits = Numbers(device, vocab)(batch.layout.samples, vocab, dtype=dtype, scale=3)
    return logits, lambda greedy: ops.sample(logits, batch, greedy)
