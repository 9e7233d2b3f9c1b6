"""The fit of a kernel: coefficients of its structured time, then the surface of the remaining ratios, then its errors.

The errors are for points that a fit did not see: every seventh size of each shape is left out in one fit, and a fifth
of the shapes in each of five others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import least_squares

from lab.kernels.aiconfigurator import Measured
from tokentwin.calibration.kernels.structure import Efficiency, structure_of
from tokentwin.calibration.kernels.surfaces import KernelFit, Surface, corners, kernel
from tokentwin.serving.deployments.gpu_spec import GpuSpec

Array = NDArray[np.float64]

_KNOTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "gemm": (
        (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768),
    ),
    "prefill": ((1, 2, 4, 8, 16, 64, 256), (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    "decode": (
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048),
        (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
    ),
    "mla_prefill": ((1, 2, 4, 8, 16, 64, 256), (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    "mla_decode": (
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
    ),
    "head_gemm": ((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),),
    "experts": ((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384),),
}
_SMOOTH = 0.03  # weight of the difference between neighbouring knots, relative to one measurement at a knot
_SAMPLE = 6000  # maximum number of points to which the three coefficients are fitted
_FOLDS = 5
_EVERY = 7  # one of this many sizes is held out
_SCALES = (2.0, 4.0, 8.0, 16.0, 32.0)  # length scales in octaves that are tried for each feature
_NUGGETS = (0.003, 0.01, 0.03, 0.1, 0.3)
_FEW = 8  # with fewer shapes, the variance between shapes cannot be estimated
_HOST_MARGIN = 1.6  # a time above this multiple of the host's shortest launch time is assumed to be the GPU's
_PLAUSIBLE = 0.4  # minimum ratio of a similar kernel's time to a measured time that is the GPU's and not the host's
# spread between shapes: the minimum, and the value for GEMMs on a GPU without tables
_LEAST_SPREAD, _FEW_SPREAD = 0.05, 0.25
_NORMAL_90 = 1.645  # standard deviations; 90 % of a normal distribution lies within them


@dataclass(frozen=True)
class HeldOut:
    """Absolute relative errors at points that a fit did not see: at left-out shapes, and at left-out sizes."""

    shapes_median: float
    shapes_p90: float
    sizes_median: float
    sizes_p90: float


def fit_kernel(gpu: GpuSpec, measured: list[Measured], like: KernelFit | None = None) -> tuple[KernelFit, HeldOut]:
    """Fit the kernel whose shapes are `measured`, all of one key, and return its errors at held-out points.

    Args:
        like: a fit of a kernel that does about the same work. Its times replace measured times that the host limited:
            without CUDA graphs, no measured time is shorter than a launch by the host
    """
    structure = structure_of(measured[0].operation)
    real = [np.ones(len(m.ns), dtype=bool) for m in measured]
    if like is not None:
        measured, real = _without_host(gpu, measured, like)
    knots = tuple(np.log2(axis) for axis in _KNOTS[measured[0].key.split("/")[0]])
    efficiency = fit_efficiency(gpu, measured)
    shapes = np.log2(np.array([structure.shape(m.operation) for m in measured], dtype=np.float64))
    left = [np.log(m.ns / structure.ns(gpu, m.operation, efficiency)) for m in measured]
    at = [[np.log2(np.broadcast_to(s, len(m.ns))) for s in structure.sizes(m.operation)] for m in measured]
    hats = [hat_weights(knots, sizes) for sizes in at]
    smooth = _differences(knots)
    values = np.array([_at_knots(h, y, smooth) for h, y in zip(hats, left, strict=True)])
    support = np.mean([(h * own[:, None]).max(axis=0) > 0.49 for h, own in zip(hats, real, strict=True)], axis=0)
    scales, nugget = fit_scales(shapes, values, support)
    counted = np.concatenate(real)
    by_shape = np.full(counted.sum(), np.nan)  # the error at left-out shapes is unknown if there is a single shape
    if len(shapes) > 1:
        by_shape = _shapes_held_out(shapes, values, hats, left, scales, nugget)[counted]
    by_size = _sizes_held_out(hats, left, smooth)[counted]
    errors = HeldOut(*_summary(by_shape), *_summary(by_size))
    spread = max(float(np.sqrt(np.mean((values - values.mean(axis=0)) ** 2))), _least_spread(len(shapes)))
    grid = tuple(len(axis) for axis in knots)
    error = errors.sizes_p90 if len(shapes) < 2 else max(errors.shapes_p90, errors.sizes_p90)
    surface = Surface(
        shapes,
        knots,
        values.reshape(-1, *grid),
        support.reshape(grid),
        scales,
        nugget,
        error / _NORMAL_90,
        spread,
    )
    return KernelFit(efficiency, surface), errors


def _least_spread(shapes: int) -> float:
    return _LEAST_SPREAD if shapes >= _FEW else _FEW_SPREAD


def _without_host(
    gpu: GpuSpec, measured: list[Measured], like: KernelFit
) -> tuple[list[Measured], list[NDArray[np.bool_]]]:
    """Return the measurements with host-bound times replaced by scaled times of `like`, and a mask of kept times."""
    structure = structure_of(measured[0].operation)
    predicted = []
    for m in measured:
        log = like.surface.curve(structure.shape(m.operation)).residual(*structure.sizes(m.operation)).log
        predicted.append(structure.ns(gpu, m.operation, like.efficiency) * np.exp(log))
    host = np.quantile(np.concatenate([m.ns for m in measured]), 0.1)
    real = [  # long times that are not the host's delay in front of a short kernel
        (m.ns > _HOST_MARGIN * host) & (p > _PLAUSIBLE * m.ns) for m, p in zip(measured, predicted, strict=True)
    ]
    ratio = np.median(np.concatenate([(m.ns / p)[r] for m, p, r in zip(measured, predicted, real, strict=True)]))
    return [
        m._replace(ns=np.where(r, m.ns, ratio * p)) for m, p, r in zip(measured, predicted, real, strict=True)
    ], real


def fit_efficiency(gpu: GpuSpec, measured: list[Measured]) -> Efficiency:
    """Fit launch time and shares of the datasheet's rates, by robust least squares of log times."""
    structure = structure_of(measured[0].operation)
    thin = max(sum(len(m.ns) for m in measured) // _SAMPLE, 1)
    sample = measured[::thin]

    def efficiency(x: Array) -> Efficiency:
        compute, memory = 1.0 / (1.0 + np.exp(-x[1:3]))
        return Efficiency(float(np.exp(x[0])), float(compute), float(memory), float(np.exp(x[3])))

    def left(x: Array) -> Array:
        tried = efficiency(x)
        return np.concatenate([np.log(m.ns / structure.ns(gpu, m.operation, tried)) for m in sample])

    start = np.array([np.log(min(m.ns.min() for m in sample)), 1.0, 1.0, 0.0])
    bounds = ([0.0, -5.0, -5.0, -5.0], [14.0, 5.0, 5.0, 9.0])
    return efficiency(least_squares(left, start, loss="soft_l1", f_scale=0.1, bounds=bounds).x)


def fit_scales(shapes: Array, values: Array, support: Array) -> tuple[Array, float]:
    """Return the length scales and nugget with the smallest leave-one-out error over the shapes, in closed form."""
    used = values[:, support > 0] - values[:, support > 0].mean(axis=0)
    dimensions = shapes.shape[1]
    if len(shapes) < _FEW:
        return np.full(dimensions, 4.0), 0.03

    def loss(scales: Array, nugget: float) -> float:
        inverse = np.linalg.inv(kernel(shapes, shapes, scales) + nugget * np.eye(len(shapes)))
        return float(np.abs(inverse @ used / np.diag(inverse)[:, None]).mean())

    scales, nugget = np.full(dimensions, 4.0), 0.03
    for _ in range(2):
        for axis in range(dimensions):
            tried = [np.where(np.arange(dimensions) == axis, scale, scales) for scale in _SCALES]
            scales = min(tried, key=lambda s: loss(s, nugget))
        nugget = min(_NUGGETS, key=lambda n: loss(scales, n))
    return scales, nugget


def hat_weights(knots: tuple[Array, ...], at: list[Array]) -> Array:
    """Return weights of the knots in a multilinear interpolation: `[points, product of knots]`."""
    weights = np.ones((len(at[0]), 1))
    for axis, position in zip(knots, at, strict=True):
        below, share = corners(axis, position)
        hats = np.zeros((len(position), len(axis)))
        rows = np.arange(len(position))
        np.add.at(hats, (rows, below), 1.0 - share)
        np.add.at(hats, (rows, np.minimum(below + 1, len(axis) - 1)), share)
        weights = (weights[:, :, None] * hats[:, None, :]).reshape(len(position), -1)
    return weights


def _differences(knots: tuple[Array, ...]) -> Array:
    """Return differences between neighbouring knots, along every axis; they smooth a fit and fill its gaps."""
    grid = tuple(len(axis) for axis in knots)
    index = np.arange(np.prod(grid)).reshape(grid)
    rows = []
    for axis in range(len(grid)):
        for one, other in zip(
            np.take(index, range(grid[axis] - 1), axis).ravel(),
            np.take(index, range(1, grid[axis]), axis).ravel(),
            strict=True,
        ):
            row = np.zeros(index.size)
            row[one], row[other] = -1.0, 1.0
            rows.append(row)
    return np.array(rows)


def _at_knots(hats: Array, left: Array, smooth: Array) -> Array:
    normal = hats.T @ hats + _SMOOTH * smooth.T @ smooth
    return np.asarray(np.linalg.solve(normal, hats.T @ left), dtype=np.float64)


def _shapes_held_out(
    shapes: Array, values: Array, hats: list[Array], left: list[Array], scales: Array, nugget: float
) -> Array:
    """Return errors in log time of every point, predicted without its shape."""
    fold = np.random.default_rng(0).permutation(len(shapes)) % min(_FOLDS, len(shapes))
    errors: list[Array] = [np.empty(0)] * len(shapes)
    for out in range(fold.max() + 1):
        seen = fold != out
        mean = values[seen].mean(axis=0)
        solved = cho_factor(kernel(shapes[seen], shapes[seen], scales) + nugget * np.eye(seen.sum()))
        weights = cho_solve(solved, kernel(shapes[seen], shapes[~seen], scales)).T
        predicted = mean + weights @ (values[seen] - mean)
        for i, row in zip(np.flatnonzero(~seen), predicted, strict=True):
            errors[i] = left[i] - hats[i] @ row
    return np.concatenate(errors)


def _sizes_held_out(hats: list[Array], left: list[Array], smooth: Array) -> Array:
    """Return errors in log time of every seventh size of each shape, predicted without it, and NaN for other sizes."""
    errors = []
    for h, y in zip(hats, left, strict=True):
        out = np.arange(len(y)) % _EVERY == _EVERY // 2
        unseen = np.full(len(y), np.nan)
        if 0 < out.sum() < len(y):
            unseen[out] = y[out] - h[out] @ _at_knots(h[~out], y[~out], smooth)
        errors.append(unseen)
    return np.concatenate(errors)


def _summary(errors: Array) -> tuple[float, float]:
    size = np.abs(np.expm1(errors[~np.isnan(errors)]))
    if not len(size):
        return 0.0, 0.0
    return float(np.median(size)), float(np.quantile(size, 0.9))
