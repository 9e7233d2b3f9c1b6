"""What every figure is made of: lines, dots, bars and bands. Whatever else Plotly knows of them is passed on.

`hover` is what a mark says when it is pointed at, as Plotly's templates have it; None is nothing.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from dashboard.palette import tint

Values = Any  # a sequence or an array, one value a mark


def line(
    figure: go.Figure,
    x: Values,
    y: Values,
    name: str,
    colour: str,
    hover: str | None,
    width: float = 2,
    dash: str | None = None,
    shape: str | None = None,
    **more: Any,
) -> None:
    """A line, from point to point or of another `shape`."""
    stroke = {"color": colour, "width": width, "dash": dash, "shape": shape}
    known = {key: value for key, value in stroke.items() if value is not None}
    figure.add_scatter(x=x, y=y, name=name or None, line=known, **{"mode": "lines"} | _on_hover(hover) | more)


def dots(
    figure: go.Figure,
    x: Values,
    y: Values,
    name: str,
    colour: Any,
    hover: str | None,
    size: Any = 7,
    marker: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Markers; `colour` and `size` may be of each, and `marker` says what else they are like."""
    look = {"color": colour, "size": size} | (marker or {})
    figure.add_scatter(x=x, y=y, name=name or None, marker=look, **{"mode": "markers"} | _on_hover(hover) | more)


def bars(figure: go.Figure, x: Values, y: Values, name: str, colour: Any, hover: str | None, **more: Any) -> None:
    """Bars, upright unless `orientation="h"`."""
    figure.add_bar(x=x, y=y, name=name or None, marker_color=colour, **_on_hover(hover) | more)


def band(
    figure: go.Figure,
    x: Values,
    low: Values,
    high: Values,
    name: str,
    colour: str,
    alpha: float = 0.14,
    **more: Any,
) -> None:
    """What lies between two lines over `x`."""
    filled = {"fill": "toself", "mode": "none", "fillcolor": tint(colour, alpha), "hoverinfo": "skip"}
    figure.add_scatter(x=[*x, *x[::-1]], y=[*high, *low[::-1]], name=name or None, **filled | more)


def legend_once(figure: go.Figure) -> None:
    """Have each name stand in the legend once, for its marks in all panels."""
    seen: set[str] = set()
    for trace in figure.data:
        if trace.name:
            trace.update(legendgroup=trace.name, showlegend=trace.name not in seen)
            seen.add(trace.name)


def _on_hover(hover: str | None) -> dict[str, Any]:
    return {"hoverinfo": "skip"} if hover is None else {"hovertemplate": hover}
