"""Figures of the Calibration page: kernel times, their share of the roofline, and their uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from tokentwin.calibration.kernels.shapes import estimate_at, kind_of, measured_at, operation_at
from tokentwin.calibration.kernels.surfaces import KernelFit
from tokentwin.calibration.operations import floor_ns
from tokentwin.calibration.trust import TrustLevel
from tokentwin.dashboard.palette import NEUTRAL, REAL, SERIES, SIMULATED, band, dots, empty, finish, line, tint
from tokentwin.serving.deployments.gpu_spec import GpuSpec

Fits = Mapping[str, tuple[GpuSpec, KernelFit]]

_DENSE = 220
_BAND = 1.645  # standard deviations on either side that contain nine of ten
_CELLS = 28
_VAGUE = 50.0  # end of the colour scale in percent; all kernels have the same scale, so that they can be compared


def times(gpu: GpuSpec, key: str, fit: KernelFit, number: int, at: int) -> go.Figure:
    """Return measured and fitted times of one shape over its last size, with a 90 % band, and the roofline.

    If there are two sizes, `at` is the index of a knot of the first size.
    """
    knots, measured = measured_along(gpu, key, fit, number, at)
    shape = np.exp2(fit.surface.shapes[number]).tolist()
    x, sizes = _over(fit, at)
    estimate = estimate_at(gpu, key, fit, shape, sizes)
    operation = operation_at(key, shape, sizes)
    floor = np.broadcast_to(floor_ns(gpu, operation), x.shape)
    figure = go.Figure()
    spread = np.exp(_BAND * estimate.sigma)
    band(figure, x, estimate.ns * spread / 1e3, estimate.ns / spread / 1e3, "90 % band", SIMULATED)
    for ns, name, colour, width, dash in (
        (floor, "roofline", NEUTRAL, 1.5, "dash"),
        (estimate.ns, "fit", SIMULATED, 2, None),
    ):
        line(figure, x, ns / 1e3, name, colour, f"{name}: %{{y:,.4~r}} µs<extra></extra>", width, dash)
    dots(figure, knots, measured / 1e3, "measured", REAL, "measured: %{y:,.4~r} µs<extra></extra>")
    figure.update_xaxes(type="log", title_text=kind_of(key).sizes[-1], dtick=1)
    figure.update_yaxes(type="log", title_text="time (µs)", dtick=1)
    figure.update_layout(hovermode="x unified")
    return finish(figure, 400)


def measured_along(
    gpu: GpuSpec, key: str, fit: KernelFit, number: int, at: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the sizes of the kernel's table along the last axis, and the nanoseconds measured there (NaN: none)."""
    knots, measured = measured_at(gpu, key, fit, number)
    return (knots[-1][at], measured[at]) if len(knots) == 2 else (knots[-1], measured)


def worst_levels(fits: Fits, key: str, shape: Sequence[float], at: int) -> dict[str, TrustLevel]:
    """Return, for each GPU, the worst trust level of the shape's predicted times at the sizes in the GPU's table."""
    worst = {}
    for name, (gpu, fit) in fits.items():
        last = np.exp2(fit.surface.knots[-1])
        sizes = (last,) if len(fit.surface.knots) == 1 else (np.full_like(last, _knot(fit, at)), last)
        worst[name] = TrustLevel(int(np.max(estimate_at(gpu, key, fit, shape, sizes).level)))
    return worst


def utilisations(fits: Fits, key: str, shape: Sequence[float], at: int) -> go.Figure:
    """Return the share of its own roofline that each GPU reaches over the last size; dotted if extrapolated."""
    figure = go.Figure()
    for (name, (gpu, fit)), colour in zip(fits.items(), SERIES, strict=False):
        x, sizes = _over(fit, at)
        estimate = estimate_at(gpu, key, fit, shape, sizes)
        share = 100 * np.broadcast_to(floor_ns(gpu, operation_at(key, shape, sizes)), x.shape) / estimate.ns
        known = estimate.level < TrustLevel.EXTRAPOLATED
        for inside, dash in ((known, "solid"), (~known, "dot")):
            listed = dash == "solid" or not known.any()
            look = {"legendgroup": name, "showlegend": listed, "customdata": estimate.ns / 1e3}
            hover = f"{name}: %{{y:.1f}} % (%{{customdata:,.4~r}} µs)<extra></extra>"
            line(figure, x, np.where(inside, share, np.nan), name, colour, hover, dash=dash, **look)
    if not figure.data:
        return empty("No GPU has this kernel", 400)
    figure.update_xaxes(type="log", title_text=kind_of(key).sizes[-1], dtick=1)
    figure.update_yaxes(title_text="share of the roofline (%)", rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return finish(figure, 400)


class Known(NamedTuple):
    """The certainty of times over two dimensions: cells at every x and y, and the measured points.

    Attributes:
        sigma, level: certainty of each cell, `[len(y), len(x)]`, as in an `Estimate`
        dots: x and y of measured points
    """

    names: Sequence[str]
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    sigma: NDArray[np.float64]
    level: NDArray[np.int64]
    dots: Sequence[NDArray[np.float64]]


def known(gpu: GpuSpec, key: str, fit: KernelFit, number: int, at: int) -> Known:
    """Return the certainty of times over the two dimensions that matter most.

    The axes are the two sizes of a step if it has two, otherwise the first two of a shape, or shape against size.
    """
    surface, kind = fit.surface, kind_of(key)
    shape = np.exp2(surface.shapes[number])
    if len(kind.sizes) == 2:
        names: Sequence[str] = kind.sizes
        axes = [_cells(knots) for knots in surface.knots]
        x, y = np.meshgrid(*axes)
        estimate = estimate_at(gpu, key, fit, shape.tolist(), (x, y))
        measured = [axis[surface.support >= 0.5] for axis in measured_at(gpu, key, fit, number)[0]]
        sigma, level = estimate.sigma, estimate.level
    else:
        size = _knot(fit, at)
        across = len(kind.shape) > 1
        names = kind.shape[:2] if across else (kind.sizes[0], kind.shape[0])
        axes = [_cells(surface.shapes[:, feature]) for feature in (0, 1)] if across else _line(fit)
        cells = [(np.concatenate((cell, shape[2:])), size) if across else (cell[1:], cell[0]) for cell in _pairs(axes)]
        estimates = [estimate_at(gpu, key, fit, at_shape.tolist(), (at_size,)) for at_shape, at_size in cells]
        form = (len(axes[1]), len(axes[0]))
        sigma = np.array([float(estimate.sigma) for estimate in estimates]).reshape(form)
        level = np.array([int(estimate.level) for estimate in estimates]).reshape(form)
        measured = list(np.exp2(surface.shapes[:, :2]).T) if across else list(np.array(_pairs(_line(fit))).T)
    x, y = axes
    return Known(names, x, y, sigma, level, measured)


def domain(certainty: Known) -> go.Figure:
    """Return a map of the uncertainty of times; grey where they are extrapolated."""
    names, x_axis, y_axis = certainty.names, certainty.x, certainty.y
    figure = go.Figure()
    percent = 100 * (np.exp(_BAND * certainty.sigma) - 1)
    outside = certainty.level >= TrustLevel.EXTRAPOLATED
    where = f"{names[0]} %{{x:,.4~r}}, {names[1]} %{{y:,.4~r}}"
    figure.add_heatmap(
        x=x_axis,
        y=y_axis,
        z=np.where(outside, 1.0, np.nan),
        colorscale=[[0, NEUTRAL], [1, NEUTRAL]],
        opacity=0.45,
        showscale=False,
        customdata=percent,
        hovertemplate=f"{where}<br>extrapolated, ± %{{customdata:.0f}} %<extra></extra>",
    )
    figure.add_heatmap(
        x=x_axis,
        y=y_axis,
        z=np.where(outside, np.nan, percent),
        colorscale=[[0, SIMULATED], [1, tint(SIMULATED, 0.12)]],
        zmin=0,
        zmax=_VAGUE,
        colorbar={"title": {"text": "error within ± %", "side": "right"}, "thickness": 12, "len": 0.9},
        hovertemplate=f"{where}<br>error within ± %{{z:.0f}} %<extra></extra>",
    )
    x, y = certainty.dots
    dots(figure, x, y, "measured", REAL, None, 4)
    figure.update_xaxes(type="log", title_text=names[0], dtick=1, showgrid=False)
    figure.update_yaxes(type="log", title_text=names[1], dtick=1, showgrid=False)
    if len(y_axis) < _CELLS:
        figure.update_yaxes(tickvals=y_axis)
    return finish(figure, 420, legend=False)


def _over(fit: KernelFit, at: int) -> tuple[NDArray[np.float64], tuple[Any, ...]]:
    """Return sizes along the last axis, up to an octave beyond its knots; a first of two sizes is at its knot `at`."""
    last = fit.surface.knots[-1]
    x = np.exp2(np.linspace(max(last[0] - 1, 0.0), last[-1] + 1, _DENSE))
    if len(fit.surface.knots) == 1:
        return x, (x,)
    return x, (np.full_like(x, _knot(fit, at)), x)


def _knot(fit: KernelFit, at: int) -> float:
    return float(np.exp2(fit.surface.knots[0][at]))


def _cells(octaves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sizes of cells from two octaves below the lowest of `octaves` to two octaves above the highest."""
    return np.exp2(np.linspace(max(octaves.min() - 2, 0.0), octaves.max() + 2, _CELLS))


def _line(fit: KernelFit) -> list[NDArray[np.float64]]:
    """Return the knots of the only size, and the values of the shape's only feature."""
    return [np.exp2(fit.surface.knots[0]), np.exp2(np.unique(fit.surface.shapes[:, 0]))]


def _pairs(axes: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return x and y of every cell, row by row."""
    return [np.array([x, y]) for y in axes[1] for x in axes[0]]
