"""Maps of measured steps. Orange cells were measured, grey cells were not; marks show the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from tokentwin.dashboard.palette import ALARM, CLOCK_NAME, NEUTRAL, REAL, dots, finish, legend_once, run_colour, tint
from tokentwin.dashboard.series import thin
from tokentwin.dashboard.trust_page.domain import NO_ROWS, Domain, Map

_POINTS = 1200
_FAR = 3.0  # doublings beyond the measured steps at which grey is darkest
_VAGUE = 50.0  # percent; the scale of the Calibration page
_OUTLINE = {"width": 0.7, "color": "rgba(20, 26, 38, 0.7)"}  # outline by which a real step stands out from the orange
_DECADES = (1, 10, 100, 1_000, 10_000)


def domain_maps(domain: Domain, run: Mapping[str, Any]) -> go.Figure:
    """Return decode steps and steps with prompts, side by side, with marks for the steps of `run`, a row of `runs`."""
    name, colour = f"{CLOCK_NAME.get(run['clock'], 'recorded')} step", run_colour(run)
    figure = make_subplots(cols=2, horizontal_spacing=0.15, subplot_titles=("Decode steps", "Steps with prompts"))
    for at, panel in enumerate((domain.decode, domain.prompts), start=1):
        figure.add_traces(_ground(panel, domain.counted), rows=1, cols=at)
        _marks(figure, panel, name, colour, at)
        figure.update_xaxes(title_text=panel.x_title, row=1, col=at, **_log(panel.x))
        figure.update_yaxes(title_text=panel.y_title, row=1, col=at, **_log(panel.y))
    axis = _log(domain.prompts.y)
    figure.update_yaxes(tickvals=[NO_ROWS, *axis["tickvals"]], ticktext=["none", *axis["ticktext"]], col=2)
    legend_once(figure)
    figure.update_layout(coloraxis=_measured_axis(domain) if domain.counted else _known_axis())
    finish(figure, 420)
    figure.update_layout(margin_t=64, legend_y=1.1)
    return figure


def _ground(panel: Map, counted: bool) -> list[Any]:
    where = f"{panel.x_title} %{{x:.3~g}}<br>{panel.y_title} %{{y:.3~g}}"
    if counted:
        known, certainty = np.log10(np.maximum(panel.known, 0.3)), "%{customdata:,} steps measured"
        with np.errstate(invalid="ignore"):
            darkness, beyond = np.log2(panel.outside) / _FAR, "%{customdata:.1f} times beyond the nearest measured step"
    else:
        known, certainty = panel.known, "error of kernels within ± %{customdata:.0f} %"
        darkness, beyond = panel.outside / _VAGUE, "extrapolated, ± %{customdata:.0f} %"
    dark = np.clip(np.where(np.isnan(panel.outside), np.nan, darkness), 0, 1)
    common = {"x": panel.x, "y": panel.y, "hoverongaps": False}
    return [
        go.Heatmap(
            **common,
            z=dark,
            zmin=0,
            zmax=1,
            colorscale=[[0, tint(NEUTRAL, 0.16)], [1, tint(NEUTRAL, 0.55)]],
            showscale=False,
            customdata=np.where(np.isinf(panel.outside), 999, panel.outside),
            hovertemplate=f"{where}<br>{beyond}<extra></extra>",
        ),
        go.Heatmap(
            **common,
            z=known,
            coloraxis="coloraxis",
            customdata=panel.known,
            hovertemplate=f"{where}<br>{certainty}<extra></extra>",
        ),
    ]


def _marks(figure: go.Figure, panel: Map, name: str, colour: str, at: int) -> None:
    for out, label, shade, size, look in (
        (False, name, colour, 5.5, {"opacity": 0.8, "line": _OUTLINE}),
        (True, f"{name}, outside", ALARM, 7, {"symbol": "x-thin", "line": {"width": 1.6, "color": ALARM}}),
    ):
        mine: NDArray[Any] = panel.points[panel.out == out]
        x, y = mine[thin(len(mine), _POINTS)].T if len(mine) else ([None], [None])
        hover = f"{panel.x_title} %{{x:,}}<br>{panel.y_title} %{{y:,.4~r}}<extra>{label}</extra>"
        dots(figure, x, y, label, shade, hover, size, look, row=1, col=at)


def _measured_axis(domain: Domain) -> dict[str, Any]:
    most = max(1.0, *(float(np.nanmax(panel.known, initial=1.0)) for panel in (domain.decode, domain.prompts)))
    ticks = [0.3, *(decade for decade in _DECADES if decade <= most)]
    return {
        "colorscale": [[0, tint(REAL, 0.14)], [1, tint(REAL, 0.95)]],
        "cmin": float(np.log10(0.3)),
        "cmax": float(np.log10(max(most, 2))),
        "colorbar": {
            "title": {"text": "steps measured", "side": "right"},
            "thickness": 12,
            "len": 0.9,
            "tickvals": np.log10(ticks).tolist(),
            "ticktext": ["0", *(f"{decade:,}" for decade in ticks[1:])],
        },
    }


def _known_axis() -> dict[str, Any]:
    return {
        "colorscale": [[0, tint(REAL, 0.95)], [1, tint(REAL, 0.14)]],
        "cmin": 0,
        "cmax": _VAGUE,
        "colorbar": {"title": {"text": "error of kernels within ± %", "side": "right"}, "thickness": 12, "len": 0.9},
    }


def _log(edges: NDArray[Any]) -> dict[str, Any]:
    return {
        "type": "log",
        "range": np.log10([edges[0], edges[-1]]).tolist(),
        "tickvals": _powers(edges),
        "ticktext": [f"{power:,}" for power in _powers(edges)],
        "showgrid": False,
        "zeroline": False,
    }


def _powers(edges: NDArray[Any]) -> list[int]:
    """Return powers of two to label, few enough to be read."""
    every = [2**exponent for exponent in range(int(np.log2(edges[-1])) + 1)]
    return every if len(every) <= 7 else every[::2]
