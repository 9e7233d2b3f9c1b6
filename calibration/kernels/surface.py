"""A smooth surface over the logarithms of shapes and sizes: the ratio of measured to structured times.

A *shape* is what a model fixes (n and k of a GEMM, the heads of an attention), a *size* what a step brings (tokens, a
batch and its context). Over sizes the surface is piecewise linear between knots. Over shapes it is a Gaussian process
with an exponential kernel (Rasmussen and Williams, Gaussian Processes for Machine Learning, ch. 2 and 5.4.2). So it is
honest away from the data: there it returns to the mean of all shapes, and its error grows to their spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.trust import TrustLevel

Array = NDArray[np.float64]

_FAR = 0.5  # share of the variance between shapes: a shape with more of it unexplained is extrapolated
_OCTAVES = 2.0  # the learnt ratio fades at this rate beyond the last knot


class Residual(NamedTuple):
    """The log of measured over structured time, its standard error, and a `TrustLevel`, in the form of the sizes."""

    log: Array
    sigma: Array
    level: NDArray[np.int8]


@dataclass(frozen=True)
class Surface:
    """Log ratios of `shapes` at the knots of their sizes.

    Attributes:
        shapes: [shapes, features], log2
        knots: the knots of each size, log2, increasing
        values: [shapes, *knots] log ratios
        support: [*knots] share of the shapes that were measured near each knot
        scales: [features] octaves over which shapes stop resembling each other
        nugget: variance of one shape's own peculiarity, relative to the variance between shapes
        error: standard error of the log ratio among shapes and sizes like the measured ones, from held-out points
        spread: the same for a shape that resembles none
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
        """Return the surface over sizes at one shape."""
        curve = self._curves.get(shape)
        if curve is None:
            curve = self._curves[shape] = self._curve_at(np.log2(np.asarray(shape, dtype=np.float64)))
        return curve

    def _curve_at(self, at: Array) -> Curve:
        near = kernel(at[None], self.shapes, self.scales)[0]
        weights = np.linalg.solve(self._covariance, near)  # scipy's factors would take as long to import
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
    """A surface at one shape: `unknown` is the share of the variance between shapes that is not explained there."""

    surface: Surface
    values: Array
    unknown: float
    within: bool
    measured: bool

    def residual(self, *sizes: Any) -> Residual:
        """Return the residual at sizes, which are numbers or arrays and are broadcast together."""
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
    """Return the resemblance of shapes, 1 where they are equal: `[a, features], [b, features] -> [a, b]`."""
    differences = ((a[:, None] - b) / scale for a, b, scale in zip(one.T, other.T, scales, strict=True))
    return np.exp(-np.sqrt(sum(difference**2 for difference in differences)))


def corners(knots: Array, at: Any) -> tuple[NDArray[np.int64], Array]:
    """Return the knot at or below each position, and the share of the way to the next: 0..1, clamped at the ends."""
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
