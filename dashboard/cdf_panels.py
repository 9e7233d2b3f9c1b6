"""Distributions of latencies: a panel for each metric, a line for each run or side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from tokentwin.dashboard.palette import empty, finish, legend_once, line, slo_line
from tokentwin.serving.metrics import axis_of

_TICKS = 4  # ticks per panel where several stand side by side on a telephone
_FEW = 10  # fewer values than this get markers, because a line alone would show little
_SECONDS_FROM_MS = 10_000
_UNIT = {1.0: "ms", 1000.0: "s"}


Values = Sequence[float] | NDArray[Any]
Curve = tuple[Values, Values]


class Line(NamedTuple):
    """Distributions by metric, and their look; a curve has values, and the percent of requests up to them."""

    curves: Mapping[str, Curve]
    name: str
    colour: str
    width: float = 2.2
    opacity: float = 1.0
    dash: str | None = None


def cdf_panels(
    lines: Sequence[Line], metrics: Sequence[str], height: int, bounds: Sequence[tuple[str, float]] = ()
) -> go.Figure:
    """Draw a panel for each metric that has values, with a line at each of its SLOs' `bounds` (metric, ms).

    Axes show every p99 and every bound, but may leave out extreme values.

    Curves are in milliseconds; an axis that reaches 10,000 ms is in seconds (`axis_ms`).
    """
    panels = [metric for metric in metrics if any(len(line.curves[metric][0]) for line in lines)]
    if not panels:
        return empty("No request finished", height)
    figure = make_subplots(cols=len(panels), shared_yaxes=True, horizontal_spacing=0.035)
    units = {metric: axis_ms([line.curves[metric] for line in lines]) for metric in panels}
    for curves, name, colour, width, opacity, dash in lines:
        for at, metric in enumerate(panels, start=1):
            x, y = curves[metric]
            if len(x):
                unit, mode = units[metric], "lines" if len(x) >= _FEW else "lines+markers"
                hover = f"%{{x:,.4~r}} {_UNIT[unit]}<br>%{{y:.1f}} % of requests"
                how: dict[str, Any] = {"mode": mode, "opacity": opacity, "row": 1, "col": at}
                line(figure, np.asarray(x) / unit, y, name, colour, hover, width, dash, "hv", **how)
    legend_once(figure)
    for at, metric in enumerate(panels, start=1):
        unit = units[metric]
        mine = [bound / unit for name, bound in bounds if name == metric]
        for bound in mine:
            slo_line(figure, bound, row=1, col=at)
        ends = [0, max([_reach([line.curves[metric] for line in lines]) / unit, *(1.05 * bound for bound in mine)])]
        title = axis_of(metric).replace("(ms)", f"({_UNIT[unit]})")
        figure.update_xaxes(title_text=title, range=ends, nticks=_TICKS, row=1, col=at)
    figure.update_yaxes(range=[0, 101], tickvals=[0, 25, 50, 75, 90, 99])
    figure.update_yaxes(title_text="requests (%)", row=1, col=1)
    return finish(figure, height)


def axis_ms(curves: Sequence[Curve]) -> float:
    """Return the milliseconds in one unit of the axis of these curves: 1000 if they reach 10,000 ms, else 1."""
    return 1000.0 if any(len(x) for x, _ in curves) and _reach(curves) >= _SECONDS_FROM_MS else 1.0


def _reach(curves: Sequence[Curve]) -> float:
    known = [(x, y) for x, y in curves if len(x)]
    tails = [x[min(int(np.searchsorted(y, 99)), len(x) - 1)] for x, y in known]
    return float(min(max(x[-1] for x, _ in known), 1.3 * max(tails)) * 1.03)
