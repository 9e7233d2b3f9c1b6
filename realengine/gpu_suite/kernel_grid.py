"""How long each operation of a layer takes over the sizes that a step can have, beside what the device allows.

Shapes are those of Llama-3.1-8B and Qwen3-0.6B, and of the experts of two mixtures; inputs are random, and each is
called as the engine calls it. Targets come first, then a coarse grid, then the rest: a run may be cut short anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from realengine.gpu_suite.expert_batch import ExpertBatch, Mixture
from realengine.gpu_suite.kernel_costs import (
    Cost,
    add_rms_norm_cost,
    attention_cost,
    experts_cost,
    gemm_cost,
    packed_cost,
    rope_store_cost,
    sample_cost,
    silu_mul_cost,
)
from realengine.gpu_suite.packing import Packing
from realengine.gpu_suite.ragged_batch import (
    Backend,
    Draw,
    Numbers,
    Row,
    backend_for,
    batch_of,
    pool_blocks,
    random_cache,
)
from realengine.gpu_suite.timing import Bench, Timing
from realengine.kernels.attention_shapes import Shape
from realengine.kv_cache import LayerKv
from realengine.layer_ops import HeadNorms
from realengine.projection import DenseProjection, Fp8Projection, quantised
from realengine.rope import Rope
from realengine.weights import RANDOM
from serving.deployments.model_catalogue import find_model
from serving.deployments.model_spec import ModelSpec
from traces.schema import Column

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
_NAME = {_BF16: "bf16", _FP8: "fp8"}
_PAGE = 16
_LONGEST = 16_896  # tokens: the suite's deployments split decode rows for this context
_MOST_KV_TOKENS = 1 << 22  # 16 GiB of a layer of either model
_SIZES = tuple(1 << power for power in range(15))

_I64, _F64, _TEXT = pa.int64(), pa.float64(), pa.string()

GRID_COLUMNS = (
    Column("op", _TEXT, "", "the operation: a gemm, attention_decode, attention_prefill, or a fused kernel's name"),
    Column("model", _TEXT, "", "the model whose shapes these are"),
    Column("part", _TEXT, "", "which GEMM of a layer, how tokens are drawn, or `whole`: KV not divided; else empty"),
    Column("backend", _TEXT, "", "whose implementation: torch, triton, or hybrid (whole prompts by torch's SDPA)"),
    Column("dtype", _TEXT, "", "of weights in a GEMM, of activations elsewhere"),
    Column("kv_dtype", _TEXT, "", "of the KV cache; null where there is none"),
    Column("rows", _I64, "", "requests in the batch; null for a GEMM, which sees tokens alone"),
    Column("tokens", _I64, "tokens", "query tokens of all rows: m of a GEMM"),
    Column("context", _I64, "tokens", "KV tokens of a row, this step's included, in the mean; null without attention"),
    Column("longest", _I64, "tokens", "KV tokens of the longest row"),
    Column("inputs", _I64, "", "length of a token's input: k of a GEMM, heads x dimension, hidden size, vocabulary"),
    Column("outputs", _I64, "", "length of a token's output: n of a GEMM"),
    Column("median_ns", _F64, "ns", "device time of one call, median; null if it failed"),
    Column("spread_pct", _F64, "%", "distance of the quartiles, of the median"),
    Column("repeats", _I64, "", "timings behind the median"),
    Column("bytes", _I64, "bytes", "what the definition must move: each input read once, each output written once"),
    Column("flops", _I64, "", "of matrix products, two for a multiply-add; elementwise arithmetic counts as none"),
    Column("roofline_ns", _F64, "ns", "the larger of bytes at copy bandwidth and flops at the GEMM rate, as measured"),
    Column("roofline_share", _F64, "", "roofline_ns / median_ns"),
    Column("error", _TEXT, "", "why there is no time; null if there is one"),
)


class Point(NamedTuple):
    """One row to be measured: `order` 0 for targets, 1 for the coarse grid, 2 for the rest."""

    order: int
    about: dict[str, Any]
    cost: Cost
    measure: Callable[[Bench], Timing]


def kernel_grid(
    bench: Bench, device: torch.device, ceilings: dict[str, Any], dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Rows with the columns `GRID_COLUMNS`, the most valuable first; rooflines are of `measure_ceilings`.

    An operation that raises has a row with its error. `dry_run` does some tiny ones.
    """
    for point in points(device, dry_run):
        yield measured(point, bench, ceilings)


def points(device: torch.device, dry_run: bool) -> list[Point]:
    """What is measured, in that order."""
    return sorted(_tiny_points(device) if dry_run else _points(device), key=lambda point: point.order)


def measured(point: Point, bench: Bench, ceilings: dict[str, Any]) -> dict[str, Any]:
    """The row of `point`."""
    row = dict.fromkeys(column.name for column in GRID_COLUMNS) | point.about | point.cost._asdict()
    rate = ceilings["gemm_flops_per_s"]
    if row["op"] == "gemm" and row["dtype"] == "fp8":
        rate = ceilings.get("fp8_gemm_flops_per_s") or rate
    row["roofline_ns"] = 1e9 * max(point.cost.bytes / ceilings["copy_bytes_per_s"], point.cost.flops / rate)
    try:
        timing = point.measure(bench)
    except Exception as failure:  # whatever a launch may raise: the other rows are worth having
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    return row | timing._asdict() | {"roofline_share": row["roofline_ns"] / timing.median_ns}


def write_grid(rows: Iterable[dict[str, Any]], path: Path, environment: dict[str, Any]) -> None:
    """Rows of `kernel_grid` as Parquet. Every field carries its unit and definition, the schema the environment."""
    about = {f"tokentwin.{name}": str(value) for name, value in environment.items()}
    schema = pa.schema([column.field for column in GRID_COLUMNS], metadata=about)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def _points(device: torch.device) -> Iterator[Point]:
    large, small = RANDOM["llama-3.1-8b"], RANDOM["qwen3-0.6b"]
    for spec in (large, small):
        yield from _decode_points(spec, spec is large)
        yield from _prefill_points(spec, spec is large)
    for spec in (large, small):
        targets = (1, 8, 64, 8192) if spec is large else (256,)
        for part, tokens in ((part, tokens) for part in _parts(spec) for tokens in _SIZES):
            if part == "head" and tokens > 1024:  # only sampled rows get there
                continue
            coarse = tokens in (1, 16, 256, 2048, 8192)
            yield gemm_point(0 if tokens in targets else 1 if coarse else 2, spec, part, tokens, _BF16)
            yield gemm_point(1 if tokens in (1, 64, 8192) else 2, spec, part, tokens, _FP8)
    for tokens in (1, 4, 16, 64, 256, 2048, 8192):
        order = 1 if tokens in (1, 64, 2048) else 2
        for part in _parts(large):
            if part != "head":  # which stays in 16 bits
                yield packed_point(order, large, part, tokens, device)
        for name in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
            yield experts_point(order, find_model(name), tokens, device)
    for spec in (large, small):
        for tokens in _SIZES:
            order = 1 if tokens in (1, 64, 512, 8192) else 2
            yield norm_point(order, spec, tokens, device)
            yield silu_point(order, spec, tokens, device)
            yield rope_point(order, spec, tokens, device)
        for rows in (1, 4, 16, 64, 256):
            order = 1 if rows in (1, 64) else 2
            for how in (None, (0.8, 0, 0.95), (0.8, 50, 1.0), (1.0, 0, 1.0)):
                yield sample_point(order, spec, rows, how, device)


def _decode_points(spec: ModelSpec, large: bool) -> Iterator[Point]:
    targets = {(1, 1024), (8, 1024), (64, 1024), (16, 4096), (64, 4096), (16, 16384), (64, 16384), (256, 4096)}
    for context in (128, 1024, 4096, 16384, 65536, 131072):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if rows * context > _MOST_KV_TOKENS or context > spec.max_positions:
                continue
            coarse = rows in (1, 16, 64, 256) and context in (1024, 4096, 16384)
            order = 0 if large and (rows, context) in targets else 1 if coarse else 2
            yield attention_point(order, spec, [(context, 1)] * rows, _BF16, "triton")
            if coarse:
                yield attention_point(2, spec, [(context, 1)] * rows, _FP8, "triton")
    yield attention_point(0 if large else 1, spec, [*[(1024, 1)] * 63, (16384, 1)], _BF16, "triton")
    for rows in (16, 64, 256):
        for mean in (1024, 4096):
            order = 1 if rows == 64 else 2
            yield attention_point(order, spec, uneven(rows, mean), _BF16, "triton")
            yield attention_point(order, spec, [*[(mean // 4, 1)] * (rows - 1), (8 * mean, 1)], _BF16, "triton")


def uneven(rows: int, mean: int) -> list[Row]:
    """Decode rows whose contexts rise evenly from an eighth of `mean` to 15 eighths of it, in mixed order."""
    contexts = np.linspace(mean // 8, 2 * mean - mean // 8, rows, dtype=int)
    return [(context, 1) for context in np.random.default_rng(rows).permutation(contexts).tolist()]


def _prefill_points(spec: ModelSpec, large: bool) -> Iterator[Point]:
    for tokens in (8192, 512, 2048, 1024, 4096, 16384):
        order = 0 if large and tokens == 8192 else 1
        for backend in ("triton", "hybrid"):
            yield attention_point(order, spec, [(tokens, tokens)], _BF16, backend)
    yield attention_point(2, spec, [(512, 512)] * 16, _BF16, "triton")
    for tokens in (2, 4, 16, 64, 256, 512, 2048):  # of one token it is a decode row
        for past in (2048, 8192, 32768):
            order = 1 if past == 8192 or (large and tokens in (16, 256)) else 2
            yield attention_point(order, spec, [(past + tokens, tokens)], _BF16, "triton")
    for past in (2048, 8192, 32768):
        yield attention_point(1, spec, [(past + 1, 1)], _BF16, "triton")
    for tokens in (16, 64, 256):  # beside those above, whose KV is divided
        yield attention_point(1, spec, [(8192 + tokens, tokens)], _BF16, "triton", whole=True)
    for rows in (8, 64):  # drafts of four tokens to verify
        yield attention_point(1, spec, [(4096, 5)] * rows, _BF16, "triton")
    yield attention_point(2, spec, [(8192, 8192)], _FP8, "triton")


def _tiny_points(device: torch.device) -> Iterator[Point]:
    spec = RANDOM["qwen3"]
    for tokens in (1, 4):
        yield gemm_point(0, spec, "gate_up", tokens, _BF16)
    yield gemm_point(2, spec, "qkv", 4, _FP8)
    for cached in (_BF16, _FP8):
        yield attention_point(0, spec, [(33, 1), (70, 1)], cached, "torch")
    yield attention_point(1, spec, [(20, 20)], _BF16, "torch")
    yield attention_point(1, spec, [(40, 8)], _BF16, "torch", whole=True)
    yield packed_point(1, spec, "qkv", 4, device)
    yield experts_point(1, RANDOM["qwen3-moe"], 4, device)
    for make in (norm_point, silu_point, rope_point):
        yield make(1, spec, 4, device)
    yield sample_point(1, spec, 2, None, device)
    yield sample_point(1, spec, 2, (0.8, 0, 0.95), device)


def _parts(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a model's merged projections."""
    attended = spec.num_heads * spec.head_dim
    return {
        "qkv": (spec.hidden_size, attended + 2 * spec.num_kv_heads * spec.head_dim),
        "out": (attended, spec.hidden_size),
        "gate_up": (spec.hidden_size, 2 * spec.intermediate_size),
        "down": (spec.intermediate_size, spec.hidden_size),
        "head": (spec.hidden_size, spec.vocab_size),
    }


def gemm_point(order: int, spec: ModelSpec, part: str, tokens: int, dtype: torch.dtype) -> Point:
    """A projection of the model, in bf16 or with its weights and activations in fp8."""
    inputs, outputs = _parts(spec)[part]

    def measure(bench: Bench) -> Timing:
        numbers = Numbers(bench.device)

        def make(_: int) -> tuple[Any, Tensor]:
            weight = numbers(outputs, inputs)
            projection = DenseProjection(weight) if dtype == _BF16 else Fp8Projection(*quantised(weight))
            return projection, numbers(tokens, inputs)

        return bench.time(make, lambda x: x[0](x[1]), dtype.itemsize * inputs * outputs + 2 * tokens * inputs)

    about = _about("gemm", spec, "torch", tokens, dtype=_NAME[dtype], part=part, inputs=inputs, outputs=outputs)
    return Point(order, about, gemm_cost(tokens, inputs, outputs, dtype.itemsize), measure)


def packed_point(order: int, spec: ModelSpec, part: str, tokens: int, device: torch.device) -> Point:
    """A projection of the model with its weights in 4 bits, symmetric in groups of 128."""
    inputs, outputs = _parts(spec)[part]
    packing = Packing(outputs, inputs, 4, 128)
    cost = packed_cost(tokens, packing)

    def measure(bench: Bench) -> Timing:
        ops, numbers = _backend(spec, bench.device).ops, Numbers(bench.device)

        def make(_: int) -> tuple[Any, Tensor]:
            return ops.packed(packing.weight(numbers, _BF16), _BF16, None), numbers(tokens, inputs)

        return bench.time(make, lambda x: x[0](x[1]), cost.bytes)

    about = _about("packed_gemm", spec, _name(device), tokens, dtype="int4", part=part, inputs=inputs, outputs=outputs)
    return Point(order, about, cost, measure)


def experts_point(order: int, spec: ModelSpec, tokens: int, device: torch.device) -> Point:
    """The routed experts of a layer of the model, all on this device, chosen at random."""
    mixture = Mixture(spec.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.experts_per_token)
    cost = experts_cost(tokens, mixture)

    def measure(bench: Bench) -> Timing:
        ops = _backend(spec, bench.device).ops

        def make(number: int) -> ExpertBatch:
            return ExpertBatch(mixture, tokens, _BF16, Numbers(bench.device, number), ops, others=0)

        return bench.time(make, ExpertBatch.run, cost.bytes)

    about = _about("grouped_gemm", spec, _name(device), tokens, inputs=spec.hidden_size, outputs=spec.hidden_size)
    return Point(order, about, cost, measure)


def attention_point(
    order: int, spec: ModelSpec, rows: Sequence[Row], cached: torch.dtype, backend: str, whole: bool = False
) -> Point:
    """Decode if every row has one query token; else prefill, over past KV where the context is longer. With `whole` a
    prefill's KV is not divided among programs, as in the batch-invariant mode."""
    contexts = [context for context, _ in rows]
    tokens = sum(count for _, count in rows)
    shape = Shape(spec.name, spec.num_heads, spec.num_kv_heads, spec.head_dim, _BF16, cached, _PAGE)

    def measure(bench: Bench) -> Timing:
        attention = backend_for(backend, spec, _PAGE, bench.device, max(_LONGEST, *contexts), whole).attention
        batch = batch_of(rows, _PAGE, attention, bench.device)
        plan = attention.plan(batch)
        numbers, blocks = Numbers(bench.device), pool_blocks(rows, _PAGE)

        def make(_: int) -> tuple[Tensor, LayerKv]:
            return numbers(batch.layout.tokens, shape.heads, shape.dim), random_cache(shape, blocks, numbers)

        input_bytes = 2 * blocks * _PAGE * shape.kv_heads * shape.dim * cached.itemsize
        return bench.time(make, lambda x: attention.attend(x[0], plan, x[1]), input_bytes)

    cost = attention_cost(rows, shape.heads, shape.kv_heads, shape.dim, cached.itemsize)
    op = "attention_decode" if tokens == len(rows) else "attention_prefill"
    width = shape.heads * shape.dim
    part = "whole" if whole else ""
    about = _about(op, spec, backend, tokens, rows=len(rows), part=part, inputs=width, outputs=width)
    mean = sum(contexts) // len(rows)
    return Point(order, about | {"context": mean, "longest": max(contexts), "kv_dtype": _NAME[cached]}, cost, measure)


def norm_point(order: int, spec: ModelSpec, tokens: int, device: torch.device) -> Point:
    """Adding the residual, and RMSNorm."""
    hidden = spec.hidden_size

    def measure(bench: Bench) -> Timing:
        ops, numbers = _backend(spec, bench.device).ops, Numbers(bench.device)
        weight = numbers(hidden)
        return bench.time(
            lambda _: numbers(2, tokens, hidden), lambda x: ops.add_norm(x[0], x[1], weight), 4 * tokens * hidden
        )

    about = _about("add_rms_norm", spec, _name(device), tokens, inputs=hidden, outputs=hidden)
    return Point(order, about, add_rms_norm_cost(tokens, hidden), measure)


def silu_point(order: int, spec: ModelSpec, tokens: int, device: torch.device) -> Point:
    """SwiGLU's product."""
    size = spec.intermediate_size

    def measure(bench: Bench) -> Timing:
        numbers = Numbers(bench.device)
        silu_mul = _backend(spec, bench.device).ops.silu_mul
        return bench.time(lambda _: numbers(tokens, 2 * size), silu_mul, 4 * tokens * size)

    about = _about("silu_mul", spec, _name(device), tokens, inputs=2 * size, outputs=size)
    return Point(order, about, silu_mul_cost(tokens, size), measure)


def rope_point(order: int, spec: ModelSpec, tokens: int, device: torch.device) -> Point:
    """Head norms, rotation and the write to the cache, of a whole prompt."""
    merged = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shape = Shape(spec.name, spec.num_heads, spec.num_kv_heads, spec.head_dim, _BF16, _BF16, _PAGE)

    def measure(bench: Bench) -> Timing:
        attention, ops = _backend(spec, bench.device)
        batch = batch_of([(tokens, tokens)], _PAGE, attention, bench.device)
        rotation = ops.rotation(Rope(spec, tokens, bench.device), batch)
        numbers, blocks = Numbers(bench.device), pool_blocks([(tokens, tokens)], _PAGE)
        norms = HeadNorms(*numbers(2, spec.head_dim)) if spec.qk_norm else None

        def make(_: int) -> tuple[Tensor, LayerKv]:
            return numbers(batch.layout.tokens, merged), random_cache(shape, blocks, numbers)

        return bench.time(make, lambda x: ops.rope_store(x[0], rotation, norms, x[1], batch), 2 * tokens * merged)

    about = _about("rope_store", spec, _name(device), tokens, rows=1, kv_dtype="bf16", inputs=merged, outputs=merged)
    return Point(order, about, rope_store_cost(tokens, spec), measure)


def sample_point(
    order: int, spec: ModelSpec, rows: int, how: tuple[float, int, float] | None, device: torch.device
) -> Point:
    """A token for each of `rows`: the likeliest, or drawn with that temperature, top-k and top-p."""
    vocab = spec.vocab_size

    def measure(bench: Bench) -> Timing:
        attention, ops = _backend(spec, bench.device)
        draws: list[Draw | None] = [how and (*how, (index + 0.5) / rows) for index in range(rows)]
        batch = batch_of([(1, 1)] * rows, _PAGE, attention, bench.device, draws=draws)
        numbers, samples = Numbers(bench.device), batch.layout.samples
        return bench.time(
            lambda _: numbers(samples, vocab, scale=3), lambda x: ops.sample(x, batch, how is None), 2 * rows * vocab
        )

    part = "" if how is None else f"temperature {how[0]:g}, top-k {how[1]}, top-p {how[2]:g}"
    op = "argmax" if how is None else "draw"
    about = _about(op, spec, _name(device), rows, rows=rows, part=part, inputs=vocab, outputs=1)
    return Point(order, about, sample_cost(rows, vocab, how is not None), measure)


def _about(op: str, spec: ModelSpec, backend: str, tokens: int, **more: Any) -> dict[str, Any]:
    named = {"op": op, "model": spec.name.removeprefix("random:"), "backend": backend, "tokens": tokens}
    return named | {"part": "", "dtype": "bf16"} | more


def _backend(spec: ModelSpec, device: torch.device) -> Backend:
    return backend_for(_name(device), spec, _PAGE, device, _LONGEST)


def _name(device: torch.device) -> str:
    return "torch" if device.type == "cpu" else "triton"
