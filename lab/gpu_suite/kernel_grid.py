"""The time of each operation of a layer over the possible sizes of a step, with the limits of the device.

Shapes are those of Llama-3.1-8B and Qwen3-0.6B, and of the experts of two MoE models. Inputs are random, and each
operation is called as the engine calls it. Points with targets come first, then a coarse grid, then the rest, because a
run may end before all are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lab.gpu_suite.attention_operations import attention, rope_store
from lab.gpu_suite.operations import (
    Mixture,
    On,
    Operation,
    Packing,
    add_rms_norm,
    argmax,
    draw,
    gemm,
    grouped_gemm,
    packed_gemm,
    silu_mul,
)
from lab.gpu_suite.ragged_batch import Row
from lab.gpu_suite.timing import Bench
from tokentwin.realengine.kernels.launches import Shape
from tokentwin.realengine.models.weights import RANDOM, random_spec
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.traces.schema import Column

_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
_LONGEST = 16_896  # context in tokens for which decode rows are split, as in the suite's deployments
_MOST_KV_TOKENS = 1 << 22  # 16 GiB of KV in a layer of either model
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
    operation: Operation


def grid(
    bench: Bench, device: torch.device, ceilings: dict[str, Any], dry_run: bool
) -> list[Callable[[], list[dict[str, Any]]]]:
    """Return the measurements, the most valuable first; each returns a row with the columns `GRID_COLUMNS`.

    Rooflines are those of the measured `ceilings`. `dry_run` measures a few tiny sizes.
    """
    return [partial(_row, point, bench, ceilings) for point in points(device, dry_run)]


def _row(point: Point, bench: Bench, ceilings: dict[str, Any]) -> list[dict[str, Any]]:
    return [measured(point, bench, ceilings)]


def points(device: torch.device, dry_run: bool) -> list[Point]:
    """Return the points to measure, in order."""
    on = On(device, "torch" if device.type == "cpu" else "triton")
    return sorted(_tiny_points(on) if dry_run else _points(on), key=lambda point: point.order)


def measured(point: Point, bench: Bench, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Measure `point` and return its row; if the operation raises, the row has its error."""
    cost = point.operation.cost
    row: dict[str, Any] = dict.fromkeys(column.name for column in GRID_COLUMNS)
    row |= point.about | cost._asdict()
    rate = ceilings["gemm_flops_per_s"]
    if row["op"] == "gemm" and row["dtype"] == "fp8":
        rate = ceilings.get("fp8_gemm_flops_per_s") or rate
    row["roofline_ns"] = 1e9 * max(cost.bytes / ceilings["copy_bytes_per_s"], cost.flops / rate)
    try:
        make, call, _ = point.operation.prepare()
        timing = bench.time(make, lambda given: call(*given), cost.bytes)
    except Exception as failure:  # a launch may raise anything; the other points are measured anyway
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    return row | timing._asdict() | {"roofline_share": row["roofline_ns"] / timing.median_ns}


def write_grid(rows: Iterable[dict[str, Any]], path: Path, environment: dict[str, Any]) -> None:
    """Write rows of `kernel_grid` as Parquet; fields have units and definitions, and the schema has the environment."""
    about = {f"tokentwin.{name}": str(value) for name, value in environment.items()}
    schema = pa.schema([column.field for column in GRID_COLUMNS], metadata=about)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def _points(on: On) -> Iterator[Point]:
    large, small = random_spec("random:llama-3.1-8b"), random_spec("random:qwen3-0.6b")
    for spec in (large, small):
        yield from _decode_points(on, spec, spec is large)
        yield from _prefill_points(on, spec, spec is large)
    for spec in (large, small):
        targets = (1, 8, 64, 8192) if spec is large else (256,)
        for (part, sizes), tokens in ((part, tokens) for part in _parts(spec).items() for tokens in _SIZES):
            if part == "head" and tokens > 1024:  # only sampled rows reach the head
                continue
            order = _order(tokens in targets, tokens in (1, 16, 256, 2048, 8192))
            yield _point(order, spec, gemm(on, tokens, *sizes, _BF16), part=part)
            yield _point(1 if tokens in (1, 64, 8192) else 2, spec, gemm(on, tokens, *sizes, _FP8), part=part)
    for tokens in (1, 4, 16, 64, 256, 2048, 8192):
        order = 1 if tokens in (1, 64, 2048) else 2
        for part, (inputs, outputs) in _parts(large).items():
            if part != "head":  # the head stays in 16 bits
                yield _point(order, large, packed_gemm(on, Packing(outputs, inputs, 4, 128), tokens), part=part)
        for name in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
            yield _experts_point(order, on, find_model(name), tokens)
    for spec in (large, small):
        for tokens in _SIZES:
            yield from _layer_points(1 if tokens in (1, 64, 512, 8192) else 2, on, spec, tokens)
        for rows in (1, 4, 16, 64, 256):
            yield from _sample_points(1 if rows in (1, 64) else 2, on, spec, rows)


def _order(target: bool, coarse: bool) -> int:
    """Return the `order` of a point: 0 for a target, 1 on the coarse grid, else 2."""
    if target:
        return 0
    return 1 if coarse else 2


def _decode_points(on: On, spec: ModelSpec, large: bool) -> Iterator[Point]:
    targets = {(1, 1024), (8, 1024), (64, 1024), (16, 4096), (64, 4096), (16, 16384), (64, 16384), (256, 4096)}
    for context in (128, 1024, 4096, 16384, 65536, 131072):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if rows * context > _MOST_KV_TOKENS or context > spec.max_positions:
                continue
            coarse = rows in (1, 16, 64, 256) and context in (1024, 4096, 16384)
            order = _order(large and (rows, context) in targets, coarse)
            yield _attention_point(order, on, spec, [(context, 1)] * rows)
            if coarse:
                yield _attention_point(2, on, spec, [(context, 1)] * rows, _FP8)
    yield _attention_point(0 if large else 1, on, spec, [*[(1024, 1)] * 63, (16384, 1)])
    for rows in (16, 64, 256):
        for mean in (1024, 4096):
            order = 1 if rows == 64 else 2
            yield _attention_point(order, on, spec, uneven(rows, mean))
            yield _attention_point(order, on, spec, [*[(mean // 4, 1)] * (rows - 1), (8 * mean, 1)])


def uneven(rows: int, mean: int) -> list[Row]:
    """Return decode rows in mixed order, whose contexts rise evenly from 1/8 to 15/8 of `mean`."""
    contexts = np.linspace(mean // 8, 2 * mean - mean // 8, rows, dtype=int)
    return [(context, 1) for context in np.random.default_rng(rows).permutation(contexts).tolist()]


def _prefill_points(on: On, spec: ModelSpec, large: bool) -> Iterator[Point]:
    for tokens in (8192, 512, 2048, 1024, 4096, 16384):
        order = 0 if large and tokens == 8192 else 1
        for backend in ("triton", "hybrid"):
            yield _attention_point(order, on._replace(backend=backend), spec, [(tokens, tokens)])
    yield _attention_point(2, on, spec, [(512, 512)] * 16)
    for tokens in (2, 4, 16, 64, 256, 512, 2048):  # a single token is a decode row
        for past in (2048, 8192, 32768):
            order = 1 if past == 8192 or (large and tokens in (16, 256)) else 2
            yield _attention_point(order, on, spec, [(past + tokens, tokens)])
    for past in (2048, 8192, 32768):
        yield _attention_point(1, on, spec, [(past + 1, 1)])
    for tokens in (16, 64, 256):  # some of the points above again, with undivided KV
        yield _attention_point(1, on, spec, [(8192 + tokens, tokens)], whole=True)
    for rows in (8, 64):  # rows with drafts of four tokens to verify
        yield _attention_point(1, on, spec, [(4096, 5)] * rows)
    yield _attention_point(2, on, spec, [(8192, 8192)], _FP8)


def _tiny_points(on: On) -> Iterator[Point]:
    spec = RANDOM["qwen3"]
    parts = _parts(spec)
    for order, part, tokens, dtype in ((0, "gate_up", 1, _BF16), (0, "gate_up", 4, _BF16), (2, "qkv", 4, _FP8)):
        yield _point(order, spec, gemm(on, tokens, *parts[part], dtype), part=part)
    by_torch = on._replace(backend="torch")
    for cached in (_BF16, _FP8):
        yield _attention_point(0, by_torch, spec, [(33, 1), (70, 1)], cached)
    yield _attention_point(1, by_torch, spec, [(20, 20)])
    yield _attention_point(1, by_torch, spec, [(40, 8)], whole=True)
    inputs, outputs = parts["qkv"]
    yield _point(1, spec, packed_gemm(on, Packing(outputs, inputs, 4, 128), 4), part="qkv")
    yield _experts_point(1, on, RANDOM["qwen3-moe"], 4)
    yield from _layer_points(1, on, spec, 4)
    yield from _sample_points(1, on, spec, 2)


def _parts(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the input and output length of each of a model's merged projections."""
    attended = spec.num_heads * spec.head_dim
    return {
        "qkv": (spec.hidden_size, attended + 2 * spec.num_kv_heads * spec.head_dim),
        "out": (attended, spec.hidden_size),
        "gate_up": (spec.hidden_size, 2 * spec.intermediate_size),
        "down": (spec.intermediate_size, spec.hidden_size),
        "head": (spec.hidden_size, spec.vocab_size),
    }


def _point(order: int, spec: ModelSpec, operation: Operation, **more: Any) -> Point:
    about = {"op": operation.kernel, "model": spec.name.removeprefix("random:"), **operation.about, **more}
    return Point(order, about, operation)


def _shape(spec: ModelSpec, cached: torch.dtype) -> Shape:
    return Shape(spec.name, spec.num_heads, spec.num_kv_heads, spec.head_dim, _BF16, cached, 16)


def _attention_point(
    order: int, on: On, spec: ModelSpec, rows: Sequence[Row], cached: torch.dtype = _BF16, whole: bool = False
) -> Point:
    longest = max(_LONGEST, *(context for context, _ in rows))
    return _point(order, spec, attention(on, _shape(spec, cached), rows, longest, whole))


def _experts_point(order: int, on: On, spec: ModelSpec, tokens: int) -> Point:
    mixture = Mixture(spec.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.experts_per_token)
    return _point(order, spec, grouped_gemm(on, mixture, tokens))


def _layer_points(order: int, on: On, spec: ModelSpec, tokens: int) -> Iterator[Point]:
    """Yield the operations between a layer's GEMMs, for a prompt of `tokens`."""
    yield _point(order, spec, add_rms_norm(on, tokens, spec.hidden_size))
    yield _point(order, spec, silu_mul(on, tokens, spec.intermediate_size))
    yield _point(order, spec, rope_store(on, _shape(spec, _BF16), spec, [(tokens, tokens)]))


def _sample_points(order: int, on: On, spec: ModelSpec, rows: int) -> Iterator[Point]:
    yield _point(order, spec, argmax(on, rows, spec.vocab_size))
    for how in ((0.8, 0, 0.95), (0.8, 50, 1.0), (1.0, 0, 1.0)):
        yield _point(order, spec, draw(on, rows, spec.vocab_size, kinds=[how]))
