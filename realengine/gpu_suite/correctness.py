"""Every kernel against float64, on fresh random inputs, at the shapes that it will be run and timed at.

What it must compute is in `references.py`. Memory that a kernel allocates is NaN before it runs, and so is the cache
wherever no row has written: what is not written, or read without right, is seen. Each is run twice, and a result that
moves is a race. A case that raises is a row like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realengine.gpu_suite.expert_batch import ExpertBatch, Mixture
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
from realengine.kernels.attention_shapes import SHAPES, Shape
from realengine.kv_cache import LayerKv
from realengine.layer_ops import HeadNorms, LayerOps
from realengine.rope import Rope
from realengine.step_input import Batch

_F32, _F16, _BF16, _FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
LIMIT = {_F32: 1e-5, _F16: 2e-3, _BF16: 1e-2, _FP8: 0.07}  # of `relative_error`: a few roundings, of fp8 one
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


def check_kernels(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """A row for each check, the kernels of the measured models first.

    kernel, case, dtype   what was checked, on what, in which dtype
    backend               "triton", or "torch": the references of the engine, where Triton has no device to run on
    error, limit          see `relative_error`; wrong rows (argmax); distance in cumulative mass (draw); differing
                          elements of a repeat. Text if it is not a number
    ok                    error <= limit

    `dry_run` does a few tiny shapes, in Triton's interpreter if that is on.
    """
    for case in cases(device, dry_run):
        yield from check_case(case, _backend_of(device))


def cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """What is checked. On the meta device they can be prepared and run, and nothing is computed."""
    backend = _backend_of(device)
    yield from _tiny_cases(backend, device) if dry_run else _cases(backend, device)


def check_case(case: Case, backend: str) -> Iterator[dict[str, Any]]:
    """The row of a case, and of its repeat, bit for bit, if it ran."""
    about = {"kernel": case.kernel, "case": case.case, "dtype": _name(case.dtype), "backend": backend}
    try:
        run, error_of = case.prepare()
        with _empty_is_nan():
            first, second = run(), run()
        error = float(error_of(first))
        moved = float(_differing(first, second))
    except Exception as failure:  # whatever a kernel's launch may raise
        message = f"{type(failure).__name__}: {str(failure)[:300]}"
        yield about | {"error": message, "limit": case.limit, "ok": False}
        return
    yield about | {"error": error if isfinite(error) else str(error), "limit": case.limit, "ok": error <= case.limit}
    yield about | {"case": f"{case.case}, twice", "error": moved, "limit": 0.0, "ok": moved == 0}


# What is checked


def _cases(backend: str, device: torch.device) -> Iterator[Case]:
    attention = sorted(SHAPES, key=lambda shape: (shape.page != 16, shape.cached == _FP8, shape.dtype != _BF16))
    for number, shape in enumerate(attention):
        if number == 2:  # those of the measured models are done
            yield from _small_cases(backend, device)
        yield from _attention_cases(backend, shape, device, seed=10 * number)
        yield from _rope_cases(backend, shape, device)


def _attention_cases(backend: str, shape: Shape, device: torch.device, seed: int) -> Iterator[Case]:
    ragged = [(context, 1) for context in (1, 15, 16, 17, 64, 65, 129, 1000, 4097, 2500)]
    chunks = [(700, 1), (3, 1), (300, 300), (1027, 130), (65, 2), (129, 129)]
    many = [(1 + 37 * index % 901, 1) for index in range(200)]
    yield attention_case("paged_decode", backend, shape, ragged, device, seed, longest=8192)
    yield attention_case("paged_decode", backend, shape, many, device, seed + 1, longest=1024)
    yield attention_case("paged_prefill", backend, shape, chunks, device, seed + 2, longest=2048)
    yield invariance_case(backend, shape, ragged, device, seed + 3)


def _rope_cases(backend: str, shape: Shape, device: torch.device) -> Iterator[Case]:
    norms, interleaved = shape.model.startswith("Qwen3"), shape.model.startswith("SmolLM2")
    yield rope_case(backend, shape, norms, interleaved, [(700, 1), (3, 1), (1, 1), (300, 300), (1027, 130)], device)


def _small_cases(backend: str, device: torch.device) -> Iterator[Case]:
    for size in (4096, 1024, 576, 8192):
        for tokens in (1, 300):
            yield norm_case(backend, tokens, size, _BF16, True, device)
    yield norm_case(backend, 7, 4096, _BF16, False, device)
    yield norm_case(backend, 7, 4096, _F16, True, device)
    for size in (14336, 3072, 1536):
        yield silu_case(backend, 300, size, _BF16, device)
    yield silu_case(backend, 1, 14336, _F16, device)
    mixtures = [Mixture(4096, 7168, 8, 2), Mixture(2048, 768, 128, 8)]  # Mixtral 8x7B on two ranks, Qwen3-30B-A3B
    mixtures += [mixtures[1]._replace(quantization=name) for name in ("fp8", "int4", "int8")]
    for mixture in mixtures:
        for tokens in (1, 300):
            yield experts_case(backend, mixture, tokens, _BF16, device)
    for vocab in (128_256, 151_936):
        for rows in (1, 64):
            yield argmax_case(backend, rows, vocab, _BF16, device)
            yield draw_case(backend, rows, vocab, _BF16, device)
    yield argmax_case(backend, 4, 49_152, _F32, device)
    yield draw_case(backend, 16, 49_152, _F32, device)


def _tiny_cases(backend: str, device: torch.device) -> Iterator[Case]:
    rows = [(1, 1), (17, 1), (70, 1)]
    for seed, (dtype, cached) in enumerate([(_F32, _F32), (_F16, _F16), (_BF16, _FP8)]):
        shape = Shape("tiny", 4, 2, 64, dtype, cached, 16)
        yield attention_case("paged_decode", backend, shape, rows, device, seed, longest=128)
        yield attention_case("paged_prefill", backend, shape, [(9, 1), (20, 20), (40, 7)], device, seed, longest=128)
        if dtype == _F32:
            yield invariance_case(backend, shape, rows, device, seed)
        # The interpreter rounds to fp8 wrongly.
        kept = shape if device.type != "cpu" or backend == "torch" else shape._replace(cached=dtype)
        yield rope_case(backend, kept, dtype == _F32, dtype == _F16, [(5, 1), (20, 20), (40, 7)], device)
        yield norm_case(backend, 3, 96, dtype, True, device)
        yield silu_case(backend, 3, 48, dtype, device)
        yield experts_case(backend, Mixture(72, 48, 6, 2), 40, dtype, device)
    yield experts_case(backend, Mixture(72, 48, 6, 2, "int4"), 40, _F32, device)
    yield norm_case(backend, 2, 64, _F32, False, device)
    yield argmax_case(backend, 3, 300, _F32, device)
    yield draw_case(backend, 9, 300, _F32, device)


# The cases


def attention_case(
    kernel: str, backend: str, shape: Shape, rows: Sequence[Row], device: torch.device, seed: int, longest: int
) -> Case:
    """`rows` are (context, query tokens); with one token they are for the decode kernel."""

    def prepare() -> Prepared:
        attention = backend_for(backend, layer_spec(shape), shape.page, device, longest).attention
        batch, kv, queries = _paged(shape, rows, attention, device, seed)
        return (
            lambda: (attention.attend(queries, attention.plan(batch), kv),),
            lambda out: relative_error(out[0], attended(queries, kv, batch, shape.page)),
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
            return attention.attend(queries[[row] * padded], attention.plan(single), kv)[0]

        def run() -> Outputs:
            whole = attention.attend(queries, attention.plan(batch), kv)[: len(rows)]
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


def norm_case(backend: str, tokens: int, size: int, dtype: torch.dtype, add: bool, device: torch.device) -> Case:
    """The norm, and with `add` the residual, which must be the rounded sum."""

    def prepare() -> Prepared:
        numbers = Numbers(device, tokens + size)
        x, residual = numbers(2, tokens, size, dtype=dtype, scale=3)
        weight = numbers(size, dtype=dtype)
        ops = _ops(backend, dtype, device)

        def run() -> Outputs:
            kept = residual.clone()
            return ops.add_norm(x.clone(), kept if add else None, weight), kept if add else x

        def error_of(out: Outputs) -> float:
            summed = (x.double() + residual.double()).to(dtype) if add else x
            normed = relative_error(out[0], normalised(out[1].double(), weight.double(), _EPS))
            return max(normed, relative_error(out[1], summed.double()))

        return run, error_of

    what = f"{tokens} x {size}{'' if add else ', no residual'}"
    return Case("add_rms_norm", what, dtype, LIMIT[dtype], prepare)


def silu_case(backend: str, tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Case:
    """SwiGLU's product of `[tokens, 2 * size]`."""

    def prepare() -> Prepared:
        gate_up = Numbers(device, tokens + size)(tokens, 2 * size, dtype=dtype, scale=4)
        ops = _ops(backend, dtype, device)

        def error_of(out: Outputs) -> float:
            gate, up = gate_up.double().chunk(2, dim=1)
            return relative_error(out[0], gate / (1 + (-gate).exp()) * up)

        return lambda: (ops.silu_mul(gate_up),), error_of

    return Case("silu_mul", f"{tokens} x {size}", dtype, LIMIT[dtype], prepare)


def experts_case(backend: str, mixture: Mixture, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Tokens through experts, some of which are another rank's."""

    def prepare() -> Prepared:
        batch = ExpertBatch(mixture, tokens, dtype, Numbers(device, tokens), _ops(backend, dtype, device))
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


def _backend_of(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton"
    try:
        from realengine.kernels.interpreting import INTERPRETING
    except ImportError:
        return "torch"
    return "triton" if INTERPRETING else "torch"


def _differing(first: Outputs, second: Outputs) -> int:
    """Elements whose bits differ."""
    pairs = zip(first, second, strict=True)
    return sum(
        int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(-1, a.itemsize).any(-1).sum())
        for a, b in pairs
    )


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Every tensor made without content holds NaN, or the largest integer; torch does so when it is deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
