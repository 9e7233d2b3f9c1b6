"""Kernel times of one GPU: structured times, corrected by surfaces fitted to a table of measurements.

Every operation gets a time; a time that the tables do not cover is marked as extrapolated.

A surface is the ratio of measured to structured time, a smooth function of the logarithms of shapes and sizes. A
*shape* is what the model fixes (n and k of a GEMM, the heads of an attention). A *size* is what depends on the step
(tokens, or a batch and its context). Over sizes the surface is piecewise linear between knots. Over shapes it is a
Gaussian process with an exponential kernel (Rasmussen and Williams, Gaussian Processes for Machine Learning, ch. 2 and
5.4.2). Far from the data it therefore returns to the mean of all shapes, and its stated error grows to their spread.

A Parquet file has the fitted kernels of one GPU. Each row is a shape, and its values are stored as bytes: log ratios
are rounded to 1/127 of the kernel's largest log ratio, which is well below their error. The schema's metadata has the
source of the measurements, their licence, and the errors at points that were held out of the fit. Reading raises
UserError with the file's name if the file has another format, is damaged or is for another GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tokentwin.calibration.kernels.collectives import Collectives, collectives_of
from tokentwin.calibration.kernels.structure import Efficiency, heads_as_rows, structure_of
from tokentwin.calibration.operations import (
    Collective,
    DecodeAttention,
    Elementwise,
    Estimate,
    KernelTimes,
    Operation,
    floor_ns,
)
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.errors import UserError

Array = NDArray[np.float64]

_FAR = 0.5  # a shape counts as extrapolated if more than this share of the variance between shapes is unexplained
_HEADS_AS_ROWS_SIGMA = 0.065  # of attention with half the heads and twice the rows, in tables of H100 and H200
_OCTAVES = 2.0  # distance beyond the last knot at which the log ratio has fallen to 1/e


class Residual(NamedTuple):
    """The log ratio of measured to structured time, its standard error, and a `TrustLevel`, at each requested size."""

    log: Array
    sigma: Array
    level: NDArray[np.int8]


@dataclass(frozen=True)
class Surface:
    """Log ratios of `shapes` at the knots of their sizes.

    Attributes:
        shapes: [shapes, features], log2
        knots: for each size, its knots in increasing order, log2
        values: [shapes, *knots] log ratios
        support: [*knots] share of the shapes with a measurement near each knot
        scales: [features] distance in octaves over which the similarity of shapes falls
        nugget: variance that is peculiar to a single shape, relative to the variance between shapes
        error: standard error of the log ratio at shapes and sizes like the measured ones, from held-out points
        spread: additional standard error of the log ratio at a shape unlike all measured shapes
    """

    shapes: Array
    knots: tuple[Array, ...]
    values: Array
    support: Array
    scales: Array
    nugget: float
    error: float
    spread: float
    _curves: dict[tuple[float, ...], Curve] = field(default_factory=dict, init=False, repr=False, compare=False)

    def curve(self, shape: tuple[float, ...]) -> Curve:
        """Return the surface at one shape, as a function of the sizes."""
        curve = self._curves.get(shape)
        if curve is None:
            curve = self._curves[shape] = self._curve_at(np.log2(np.asarray(shape, dtype=np.float64)))
        return curve

    @cached_property
    def most_heads(self) -> int:
        """The largest number of KV heads in the table, the first feature of an attention's shape."""
        return round(float(2.0 ** self.shapes[:, 0].max()))

    def _curve_at(self, at: Array) -> Curve:
        near = kernel(at[None], self.shapes, self.scales)[0]
        # scipy could keep a factorisation, but importing scipy takes as long as that saves
        weights = np.linalg.solve(self._covariance, near)
        mean = self.values.mean(axis=0)
        values = mean + np.tensordot(weights, self.values - mean, axes=1)
        unknown = float(np.clip(1.0 - near @ weights, 0.0, 1.0))
        low, high = self.shapes.min(axis=0) - 1e-6, self.shapes.max(axis=0) + 1e-6
        within = bool(np.all((at >= low) & (at <= high))) and unknown <= _FAR
        measured = bool(np.any(np.all(np.abs(self.shapes - at) < 1e-4, axis=1)))
        return Curve(self, values, unknown, within, measured)

    @cached_property
    def _covariance(self) -> Array:
        return kernel(self.shapes, self.shapes, self.scales) + self.nugget * np.eye(len(self.shapes))


@dataclass(frozen=True)
class Curve:
    """A surface at one shape; `unknown` is the unexplained share of the variance between shapes."""

    surface: Surface
    values: Array
    unknown: float
    within: bool
    measured: bool

    def residual(self, *sizes: Any) -> Residual:
        """Return the log ratio at sizes, which are numbers or arrays and are broadcast together."""
        surface = self.surface
        at = [np.log2(np.maximum(size, 1e-9)) for size in np.broadcast_arrays(*sizes)]
        log = interpolate(surface.knots, self.values, at)
        beyond = np.zeros_like(at[0])
        on_knots = np.full(at[0].shape, self.measured)
        for knots, position in zip(surface.knots, at, strict=True):
            beyond = np.maximum(beyond, np.maximum(knots[0] - position, position - knots[-1]))
            near = knots[np.clip(np.searchsorted(knots, position - 1e-6), 0, len(knots) - 1)]
            on_knots &= np.abs(near - position) < 1e-6
        supported = interpolate(surface.knots, surface.support, at)
        kept = np.exp(-np.maximum(beyond, 0.0) / _OCTAVES)
        unknown = 1.0 - (1.0 - self.unknown) * kept**2 * np.minimum(2.0 * supported, 1.0)
        far = (not self.within) | (beyond > 1e-6) | (supported < 0.5)
        known = np.where(on_knots, TrustLevel.VALIDATED, TrustLevel.INTERPOLATED)
        level = np.where(far, TrustLevel.EXTRAPOLATED, known).astype(np.int8)
        sigma = np.sqrt(surface.error**2 * (1.0 - unknown) + (surface.error**2 + surface.spread**2) * unknown)
        return Residual(log * kept, sigma, level)


def kernel(one: Array, other: Array, scales: Array) -> Array:
    """Return the similarity of shapes, which is 1 for equal shapes: `[a, features], [b, features] -> [a, b]`."""
    differences = ((a[:, None] - b) / scale for a, b, scale in zip(one.T, other.T, scales, strict=True))
    return np.exp(-np.sqrt(sum(difference**2 for difference in differences)))


def corners(knots: Array, at: Any) -> tuple[NDArray[np.int64], Array]:
    """Return the index of the knot at or below each position, and the fraction of the way to the next knot, 0 to 1."""
    index = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, max(len(knots) - 2, 0))
    above = knots[np.minimum(index + 1, len(knots) - 1)]
    width = np.where(above > knots[index], above - knots[index], 1.0)
    return index, np.clip((at - knots[index]) / width, 0.0, 1.0)


def interpolate(knots: tuple[Array, ...], values: Array, at: list[Any]) -> Array:
    """Interpolate linearly between knots on each axis, constant beyond them.

    `values` is `[*knots]`, and `at` has one array for each axis.
    """
    if len(knots) == 1:
        return np.interp(at[0], knots[0], values)
    located = [corners(axis, position) for axis, position in zip(knots, at, strict=True)]
    total = np.zeros(np.shape(at[0]))
    for corner in np.ndindex(*(2,) * len(knots)):
        weight, index = np.ones_like(total), []
        for (below, share), up, axis in zip(located, corner, knots, strict=True):
            weight = weight * (share if up else 1.0 - share)
            index.append(np.minimum(below + up, len(axis) - 1))
        total = total + weight * values[tuple(index)]
    return total


_SIMILAR = {
    "fp8": ("fp8_block", "bfloat16"),
    "fp8_block": ("fp8", "bfloat16"),
    "nvfp4": ("fp8", "fp8_block", "bfloat16"),
}
# standard error of log time; the tables lack elementwise kernels, so the GEMMs' launch time and bandwidth are used
_ELEMENTWISE_SIGMA = 0.3
_STAND_IN_SIGMA = 0.4  # added error if the surface of another number type is used
_WHOLE = 20  # minimum number of GEMM shapes in a table that predicts other shapes (a whole table)
_UNTABLED_SIGMA = 0.7  # standard error of log time if this kind of operation has no measurement at all


@dataclass(frozen=True)
class KernelFit:
    """The fit of one kernel: coefficients of its structured time, and the surface of the remaining ratios."""

    efficiency: Efficiency
    surface: Surface


def fitted(gpu: GpuSpec, operation: Operation, fit: KernelFit, shape: tuple[float, ...] | None = None) -> Estimate:
    """Return the times of `operation` by `fit`, never below the roofline; `shape` replaces the operation's shape."""
    if isinstance(operation, DecodeAttention) and operation.kv_heads > fit.surface.most_heads:
        time = fitted(gpu, heads_as_rows(operation, fit.surface.most_heads), fit, shape)
        halvings = np.log2(operation.kv_heads / fit.surface.most_heads)
        sigma = np.hypot(time.sigma, _HEADS_AS_ROWS_SIGMA * halvings)
        return Estimate(time.ns, sigma, np.maximum(time.level, TrustLevel.INTERPOLATED))
    structure = structure_of(operation)
    sizes = [np.maximum(size, 1.0) for size in structure.sizes(operation)]
    residual = fit.surface.curve(shape or structure.shape(operation)).residual(*sizes)
    ns = structure.ns(gpu, operation, fit.efficiency) * np.exp(residual.log)
    return Estimate(np.maximum(ns, floor_ns(gpu, operation)), residual.sigma, residual.level)


@dataclass
class KernelSurfaces:
    """`KernelTimes` of `gpu` from `fits` by key (`gemm/fp8`, `decode/bfloat16`, ...).

    Attributes:
        others: function that makes the kernel times of operations without a fit; if None, their times are structured
            times with the GEMMs' efficiency
    """

    gpu: GpuSpec
    fits: dict[str, KernelFit]
    others: Callable[[], KernelTimes] | None = None

    def time(self, operation: Operation) -> Estimate:
        if isinstance(operation, Elementwise):
            return self._elementwise(operation)
        if isinstance(operation, Collective):
            return self._collectives.time(operation)
        return self._by_type(operation, structure_of(operation).key(operation))

    def _by_type(self, operation: Operation, key: str) -> Estimate:
        """Return the time by the first that exists: own fit, a similar number type's, other GPUs' fits, structure."""
        fit = self.fits.get(key)
        if fit is not None:
            return fitted(self.gpu, operation, fit)
        kind, _, dtype = key.partition("/")
        similar_types = _SIMILAR.get(dtype, ("bfloat16",)) if self.gpu.has_unit_for(dtype) else ("bfloat16",)
        for similar in similar_types:
            fit = self.fits.get(f"{kind}/{similar}")
            if fit is not None:
                time = fitted(self.gpu, operation, fit)
                sigma = np.hypot(time.sigma, _STAND_IN_SIGMA)
                return Estimate(time.ns, sigma, np.full_like(time.level, TrustLevel.EXTRAPOLATED))
        return self._plain(operation) if self.others is None else self._others.time(operation)

    @cached_property
    def _others(self) -> KernelTimes:
        assert self.others is not None
        return self.others()

    @cached_property
    def _collectives(self) -> Collectives:
        return collectives_of(self.gpu)

    def _elementwise(self, operation: Elementwise) -> Estimate:
        """Return a time from the memory bandwidth and the launch time of GEMMs (launches are short in CUDA graphs).

        An operation that is fused into the all-reduce before it needs no launch.
        """
        efficiency = self._typical()
        launches: Any = operation.launches
        if operation.after is not None:
            launches = np.where(self._collectives.fuses(operation.after), 0, launches)
        moving = 1e9 * np.asarray(operation.bytes, dtype=np.float64) / self.gpu.memory_bytes_per_s / efficiency.memory
        ns = np.asarray(launches * efficiency.launch_ns + moving)
        level = np.full(ns.shape, TrustLevel.INTERPOLATED, dtype=np.int8)
        return Estimate(ns, np.full(ns.shape, _ELEMENTWISE_SIGMA), level)

    def _plain(self, operation: Operation) -> Estimate:
        ns = np.asarray(structure_of(operation).ns(self.gpu, operation, self._typical()), dtype=np.float64)
        ns = np.maximum(ns, floor_ns(self.gpu, operation))
        return Estimate(
            ns, np.full(ns.shape, _UNTABLED_SIGMA), np.full(ns.shape, TrustLevel.EXTRAPOLATED, dtype=np.int8)
        )

    def _typical(self) -> Efficiency:
        return self.fits["gemm/bfloat16"].efficiency


def is_whole(kernels: KernelSurfaces) -> bool:
    """Return True if the GPU has enough measured GEMM shapes to predict other shapes."""
    return len(kernels.fits["gemm/bfloat16"].surface.shapes) >= _WHOLE


def bundled(name: str) -> Path:
    """Return the path of a GPU's bundled fit, even if there is no such file."""
    return Path(__file__).with_name("gpus") / f"{name}.parquet"


def bundled_names() -> list[str]:
    """Return the names of GPUs with a bundled fit."""
    return sorted(path.stem for path in bundled("any").parent.glob("*.parquet"))


FORMAT = "tokentwin kernel surfaces 1"
_STEPS = 127
_METADATA = b"tokentwin"


def write_surfaces(path: Path, kernels: KernelSurfaces, about: dict[str, Any]) -> None:
    """Write the fits of a GPU to a file; equal inputs give identical files.

    `about` is stored unchanged. It has the source, versions, licence, date and held-out errors.
    """
    table, described = _packed(kernels)
    metadata = {"format": FORMAT, "gpu": kernels.gpu.name, "kernels": described, "about": about}
    metadata["sha256"] = _digest(table, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    described_table = table.replace_schema_metadata({_METADATA: json.dumps(metadata, sort_keys=True).encode()})
    pq.write_table(described_table, path, compression="zstd", compression_level=19)


def _packed(kernels: KernelSurfaces) -> tuple[pa.Table, dict[str, Any]]:
    """Return the file's rows and the metadata of each kernel."""
    rows: dict[str, list[Any]] = {"kernel": [], "shape": [], "log_ratio": []}
    described: dict[str, Any] = {}
    for key, fit in kernels.fits.items():
        surface = fit.surface
        step = float(np.abs(surface.values).max()) / _STEPS or 1.0
        rounded = np.round(surface.values / step).astype(np.int8)
        for shape, values in zip(surface.shapes, rounded, strict=True):
            rows["kernel"].append(key)
            rows["shape"].append(np.exp2(shape).round(3).astype(np.float32))
            rows["log_ratio"].append(values.ravel())
        described[key] = {
            "efficiency": asdict(fit.efficiency),
            "knots": [np.exp2(axis).round(3).tolist() for axis in surface.knots],
            "support": np.round(surface.support, 2).ravel().tolist(),
            "scales": surface.scales.tolist(),
            "nugget": surface.nugget,
            "error": surface.error,
            "spread": surface.spread,
            "step": step,
        }
    table = pa.table(
        {
            "kernel": pa.array(rows["kernel"]).dictionary_encode(),
            "shape": pa.array(rows["shape"], pa.list_(pa.float32())),
            "log_ratio": pa.array(rows["log_ratio"], pa.list_(pa.int8())),
        }
    )
    return table, described


def read_surfaces(path: Path, gpu: GpuSpec) -> KernelSurfaces:
    """Read the fits of `gpu`; raise UserError if the file has another format, is damaged or is for another GPU."""
    table, metadata = _read(path)
    if metadata["gpu"] != gpu.name:
        raise UserError("kernel surfaces", str(path), f"is for {metadata['gpu']}, not for {gpu.name}")
    keys = table["kernel"].to_numpy()
    shapes, ratios = table["shape"].combine_chunks(), table["log_ratio"].combine_chunks()
    fits = {}
    for key, known in metadata["kernels"].items():
        rows = pa.array(np.flatnonzero(keys == key))
        grid = tuple(len(axis) for axis in known["knots"])
        features = shapes.take(rows).flatten().to_numpy().reshape(len(rows), -1).astype(np.float64)
        values = ratios.take(rows).flatten().to_numpy().reshape(len(rows), *grid) * known["step"]
        fits[key] = KernelFit(
            Efficiency(**known["efficiency"]),
            Surface(
                np.log2(features),
                tuple(np.log2(axis) for axis in known["knots"]),
                values,
                np.array(known["support"]).reshape(grid),
                np.array(known["scales"]),
                known["nugget"],
                known["error"],
                known["spread"],
            ),
        )
    return KernelSurfaces(gpu, fits)


def about_surfaces(path: Path) -> dict[str, Any]:
    """Return what `write_surfaces` got as `about`: the source of a file's fits, and their held-out errors."""
    return _read(path)[1]["about"]


def _read(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise UserError("kernel surfaces", str(path), f"is not a readable Parquet file: {error}") from None
    try:
        metadata: dict[str, Any] = json.loads((table.schema.metadata or {})[_METADATA])
        kind = metadata["format"]
    except (KeyError, ValueError, TypeError):
        kind = "some other Parquet file"
    if kind != FORMAT:
        remedy = f"is {kind}, not {FORMAT!r}; make it with lab.kernels.fit"
        raise UserError("kernel surfaces", str(path), remedy)
    if metadata.pop("sha256", "") != _digest(table, metadata):
        remedy = "is damaged: the contents do not match the checksum; make it again"
        raise UserError("kernel surfaces", str(path), remedy)
    return table, metadata


def _digest(table: pa.Table, metadata: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in ("shape", "log_ratio"):
        digest.update(table[name].combine_chunks().flatten().to_numpy().tobytes())
    return digest.hexdigest()
