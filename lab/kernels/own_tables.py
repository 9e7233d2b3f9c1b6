"""Kernel times of our own engine (`kernels.parquet` of the GPU suite) against the surfaces of other people's tables.

`python -m lab.kernels.fit --own lab/results/gpu/h200/kernels.parquet --gpu H200` prints, by kind of operation, the
distance of our measured kernels from the bundled fit of that GPU. The suite measures two models' shapes, too few to fit
a surface to; they judge one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from calibration.kernels.catalogue import load_kernels
from calibration.operations import DecodeAttention, Gemm, Operation, PrefillAttention
from serving.deployments.gpu_spec import GpuSpec
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError

_TYPES = {"bf16": "bfloat16", "fp8": "fp8"}
_COLUMNS = ("op", "model", "dtype", "kv_dtype", "rows", "tokens", "context", "inputs", "outputs", "median_ns")


def own_measurements(path: Path) -> Iterator[tuple[str, Operation, float]]:
    """Yield kind, operation and nanoseconds of every GEMM and attention in the file.

    Raises UserError when it is no kernel table of ours.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError("tables", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise UserError("tables", str(path), f"has no column {missing[0]}; is it kernels.parquet of the GPU suite?")
    for row in table.select(list(_COLUMNS)).to_pylist():
        operation = _operation(row)
        if operation is not None and row["median_ns"]:
            yield row["op"], operation, float(row["median_ns"])


def _operation(row: dict[str, Any]) -> Operation | None:
    if row["op"] == "gemm":
        return Gemm("gemm", row["tokens"], row["outputs"], row["inputs"], _TYPES[row["dtype"]])
    if row["op"] not in ("attention_decode", "attention_prefill"):
        return None
    spec = find_model(row["model"].removeprefix("random:"))
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, _TYPES[row["kv_dtype"]])
    rows, tokens, context = row["rows"], row["tokens"], row["context"]
    if row["op"] == "attention_decode":
        return DecodeAttention("decode attention", rows, rows * context, *heads)
    length = tokens / rows
    past = context - length
    return PrefillAttention(
        "prefill attention", rows, tokens, rows * past, tokens * past + tokens * (length + 1) / 2, *heads
    )


def agreement(path: Path, gpu: GpuSpec) -> dict[str, NDArray[np.float64]]:
    """Return times of the surfaces of `gpu` over our own measurements, by kind of operation."""
    kernels = load_kernels(gpu)
    ratios: dict[str, list[float]] = {}
    for kind, operation, ns in own_measurements(path):
        ratios.setdefault(kind, []).append(float(np.asarray(kernels.time(operation).ns)) / ns)
    return {kind: np.array(ratios[kind]) for kind in sorted(ratios)}
