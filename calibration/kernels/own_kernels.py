"""Kernel times of our own engine on a GPU: what the GPU suite measured, and the bundled surfaces beyond it.

Measured times of one kind and shape are kept as ratios to the bundled surface. Their logarithms are interpolated by
radial functions (phi(r) = r, Hardy 1971) over sizes in octaves: the time at a measured size is the measured one, and in
one dimension the ratio is piecewise linear, and constant beyond the ends. A kind or shape that was not measured has the
time of the bundled surface.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tokentwin.calibration.operations import (
    DecodeAttention,
    Estimate,
    Gemm,
    KernelTimes,
    Operation,
    PrefillAttention,
    own_pairs,
)
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError

_TYPES = {"bf16": "bfloat16", "fp8": "fp8"}
_COLUMNS = ("op", "model", "dtype", "kv_dtype", "rows", "tokens", "context", "inputs", "outputs", "median_ns")
_BATCH_COLUMNS = ("backend", "longest", "part")
_GPU, _DRY_RUN = b"tokentwin.gpu", b"tokentwin.dry_run"  # in the table's metadata
_DIGITS = 4  # of sizes in octaves; equal sizes are interpolated once


class KernelRatio(NamedTuple):
    """The measured time of a kernel over that of the bundled surface: `log` at `place` (sizes in octaves)."""

    shape: str
    place: tuple[float, ...]
    log: float


class OwnKernels:
    """`KernelTimes` of `base`, multiplied by the interpolated `ratios`."""

    def __init__(self, base: KernelTimes, ratios: Iterable[KernelRatio]) -> None:
        self.gpu, self._base = base.gpu, base
        by_shape: dict[str, list[KernelRatio]] = {}
        for ratio in ratios:
            by_shape.setdefault(ratio.shape, []).append(ratio)
        self._measured = {shape: _interpolant(many) for shape, many in by_shape.items()}

    def time(self, operation: Operation) -> Estimate:
        time = self._base.time(operation)
        measured = self._measured.get(_shape(operation))
        if measured is None:
            return time
        return time._replace(ns=np.asarray(time.ns) * np.exp(_between(_place(operation), *measured)))


def kernel_ratios(base: KernelTimes, path: Path, backend: str, batch_invariant: bool = False) -> list[KernelRatio]:
    """Return the ratios of the measured times in `path` to `base`, for attention of the `backend` only.

    With `batch_invariant`, attention is that over undivided KV, else that over divided KV. Batches of unequal rows are
    left out, because a step is priced by its sums. Raises UserError for another file, another GPU and a dry run.
    """
    made = []
    for row, operation in _measured(path, base.gpu):
        even = row.get("longest") in (None, row["context"])
        undivided = row.get("part") == "whole"
        alike = row.get("backend", backend) == backend and undivided == batch_invariant
        if even and (isinstance(operation, Gemm) or alike):
            log = float(np.log(row["median_ns"] / float(base.time(operation).ns)))
            made.append(KernelRatio(_shape(operation), tuple(_place(operation).ravel().tolist()), log))
    return made


def own_measurements(path: Path) -> Iterator[tuple[str, Operation, float]]:
    """Yield kind, operation and ns of each GEMM and attention in our table; raise UserError for another file."""
    for row, operation in _measured(path):
        yield row["op"], operation, float(row["median_ns"])


def _measured(path: Path, gpu: GpuSpec | None = None) -> Iterator[tuple[dict[str, Any], Operation]]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError("kernels", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing:
        raise UserError("kernels", str(path), f"has no column {missing[0]}; is it kernels.parquet of the GPU suite?")
    _check_gpu(path, table.schema.metadata or {}, gpu)
    known = [*_COLUMNS, *(name for name in _BATCH_COLUMNS if name in table.column_names)]
    for row in table.select(known).to_pylist():
        operation = _operation(row)
        if operation is not None and row["median_ns"]:
            yield row, operation


def _check_gpu(path: Path, metadata: dict[bytes, bytes], gpu: GpuSpec | None) -> None:
    """Raise UserError if the table was measured on another GPU, or in a dry run."""
    if metadata.get(_DRY_RUN) == b"True":
        raise UserError("kernels", str(path), "is of a dry run, which measures nothing; run the GPU suite on the GPU")
    name = metadata.get(_GPU, b"").decode()
    if gpu is None or not name:
        return
    try:
        same = find_gpu(name).name == gpu.name
    except UserError:
        same = False
    if not same:
        raise UserError("kernels", str(path), f"was measured on {name}, not on {gpu.name}; give a table of {gpu.name}")


def _operation(row: dict[str, Any]) -> Operation | None:
    """Return the operation of a row; None if it is neither a GEMM nor attention, or its number type has no surface."""
    if row["dtype" if row["op"] == "gemm" else "kv_dtype"] not in _TYPES:
        return None
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


def _shape(operation: Operation) -> str:
    if isinstance(operation, Gemm):
        return f"gemm {operation.n} {operation.k} {operation.dtype}"
    if isinstance(operation, DecodeAttention | PrefillAttention) and not operation.window:
        heads = f"{operation.heads} {operation.kv_heads} {operation.head_dim} {operation.kv_dtype}"
        return f"{'decode' if isinstance(operation, DecodeAttention) else 'prefill'} {heads}"
    return ""


def _place(operation: Operation) -> NDArray[np.float64]:
    """Return the sizes of an operation in octaves, `[..., sizes]`."""
    sizes: tuple[Any, ...]
    if isinstance(operation, Gemm):
        sizes = (operation.m,)
    elif isinstance(operation, DecodeAttention):
        sizes = operation.rows, operation.context / np.maximum(operation.rows, 1)
    else:
        assert isinstance(operation, PrefillAttention)
        tokens = np.maximum(operation.tokens, 1.0)
        own = own_pairs(operation.rows, operation.tokens, operation.past, operation.pairs)
        length = np.maximum(2.0 * own / tokens - 1.0, 1.0)
        sizes = tokens / length, length, 1.0 + np.maximum(operation.pairs - own, 0.0) / tokens
    return np.stack(np.broadcast_arrays(*(np.log2(np.maximum(np.asarray(s, float), 1.0)) for s in sizes)), axis=-1)


def _interpolant(ratios: list[KernelRatio]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distinct places `[places, sizes]`, and a weight for each and a constant `[places + 1]`."""
    places, back = np.unique(np.round([one.place for one in ratios], _DIGITS), axis=0, return_inverse=True)
    logs = np.bincount(back.ravel(), [one.log for one in ratios]) / np.bincount(back.ravel())
    count = len(places)
    system = np.ones((count + 1, count + 1))
    system[:count, :count] = -_distances(places, places)
    system[count, count] = 0.0
    return places, np.linalg.solve(system, np.append(logs, 0.0))


def _between(at: NDArray[np.float64], places: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    flat = np.round(at.reshape(-1, at.shape[-1]), _DIGITS)
    distinct, back = np.unique(flat, axis=0, return_inverse=True)
    logs = weights[-1] - _distances(distinct, places) @ weights[:-1]
    return np.asarray(logs[back.ravel()].reshape(at.shape[:-1]))


def _distances(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(np.square(one[:, None, :] - other).sum(axis=-1))
