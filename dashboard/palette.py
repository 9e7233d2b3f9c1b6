"""The look of all figures. In every figure blue means simulated, and orange means real.

The colours hold on a light and on a dark background. Fonts, grid lines and backgrounds are left to the theme of the
page, so that a figure follows it. Lines, dots, bars and bands are drawn here; other arguments go to Plotly. `hover` is
the text on hover, a template of Plotly; None shows nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from tokentwin.calibration.trust import EXTRAPOLATED
from tokentwin.serving.answers.figures import shown_number

SIMULATED = "#3b7ddd"
REAL = "#e8822a"
NEUTRAL = "#8592a6"
ALARM = "#d34b48"

# The colours of policies are not orange, which means real, and not near the greys, which mean that nothing can be said.
# They, and those of SERIES, differ by a Delta E of 12 or more also under deuteranopia and protanopia (test_palette.py).
POLICY = {
    "vllm": SIMULATED,
    "static": "#dc0036",
    "prefill-first": "#726a92",
    "sglang": "#146d62",
    "trtllm": "#44a9e1",
    "sarathi": "#2f6a02",
    "sjf": "#2d4cd1",
    "priority-ageing": "#af1653",
    "edf": "#159077",
    "fair": "#4ab17a",
}

# A user's own policy gets one of these colours, so that it is never taken for another.
OWN_POLICY = ("#c2557f", "#5b8f2a", "#2f4fb0", "#b5651d", "#3b8ea5", "#7a5cc2")

# Colours for the series of one figure, which are all simulated.
SERIES = (SIMULATED, "#44a586", "#ad2053", "#6f620e", "#2babe2", "#905a89", "#cd5757", "#4141e0")

# Marks beside the colours of series, for those who see no difference between the colours.
MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon")

CLOCK = {"virtual": SIMULATED, "wall": REAL}
CLOCK_NAME = {"virtual": "simulated", "wall": "real"}

Values = Any  # a sequence or an array, one value per mark
_STEPS = (tuple(range(1, 10)), (1, 2, 5), (1,))  # ticks within a decade, the finest first
_MANY = 9  # largest number of ticks


def policy_colour(name: str) -> str:
    """Return the colour of a scheduling policy: a policy has the same colour in every figure, also a user's own."""
    return POLICY.get(name) or OWN_POLICY[zlib.crc32(name.encode()) % len(OWN_POLICY)]


def run_colour(run: Mapping[str, Any]) -> str:
    """Return the colour of a recorded run, by its row of `runs`: blue if it was simulated, orange if it is real."""
    return CLOCK.get(run["clock"], NEUTRAL)


def symbols(levels: Iterable[str], symbol: str = "circle") -> list[str]:
    """Return a marker for each point by the trust in it; a hollow marker means extrapolated on every page."""
    return [f"{symbol}-open" if level == EXTRAPOLATED else symbol for level in levels]


def tint(colour: str, alpha: float) -> str:
    """Return a `#rrggbb` colour, made transparent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def pale(colour: str) -> str:
    """Return a `#rrggbb` colour halfway to white: solid, so that text on it stays legible in either theme."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


def phase_colours(colour: str) -> dict[str, str]:
    """Return the colour of each phase: grey for queue, pale for prefill, and the clock's own colour for decode."""
    return {"queue": NEUTRAL, "prefill": pale(colour), "decode": colour}


def finish(figure: go.Figure, height: int, legend: bool = True) -> go.Figure:
    """Apply the layout of all figures: margins, and and a legend above the plot."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 36 if legend else 28, "b": 8},
        showlegend=legend,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "xanchor": "left", "x": 0.0},
        hoverlabel={"namelength": -1},
        bargap=0.3,
    )
    figure.update_annotations(font_size=12)
    figure.update_xaxes(automargin=True, title_standoff=12)
    figure.update_yaxes(automargin=True, title_standoff=16)
    return figure


def empty(message: str, height: int) -> go.Figure:
    """Return a figure that says why it has nothing to show."""
    figure = go.Figure()
    figure.add_annotation(text=message, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", opacity=0.7)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return finish(figure, height, legend=False)


def log_axis(low: float, high: float, most: int = _MANY) -> dict[str, Any]:
    """Return settings of a logarithmic axis from `low` to `high`, both above 0, with about `most` ticks or fewer.

    Its ticks are labelled with whole numbers, because Plotly's labels omit the power of ten (5, 100, 2, 5).
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        seen = [tick for tick in ticks if low / 1.2 <= tick <= 1.2 * high]
        if len(seen) <= most:
            break
    return {"type": "log", "tickvals": ticks, "ticktext": list(map(shown_number, ticks))}


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
    """Add a line, from point to point or of another `shape`."""
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
    """Add markers; `colour` and `size` may be one value per point, and `marker` holds Plotly's other settings."""
    look = {"color": colour, "size": size} | (marker or {})
    figure.add_scatter(x=x, y=y, name=name or None, marker=look, **{"mode": "markers"} | _on_hover(hover) | more)


def bars(figure: go.Figure, x: Values, y: Values, name: str, colour: Any, hover: str | None, **more: Any) -> None:
    """Add bars, upright unless `orientation="h"`."""
    figure.add_bar(x=x, y=y, name=name or None, marker_color=colour, **_on_hover(hover) | more)


def band(
    figure: go.Figure,
    x: Values,
    one: Values,
    other: Values,
    name: str,
    colour: str,
    alpha: float = 0.14,
    **more: Any,
) -> None:
    """Fill the area between two lines over `x`."""
    filled = {"fill": "toself", "mode": "none", "fillcolor": tint(colour, alpha), "hoverinfo": "skip"}
    figure.add_scatter(x=[*x, *x[::-1]], y=[*one, *other[::-1]], name=name or None, **filled | more)


def slo_line(figure: go.Figure, at: float, label: str = "", axis: str = "x", log: bool = False, **where: Any) -> None:
    """Draw the bound of an SLO: a dashed line at the value `at` of an axis, with its label; `log`: of a log axis."""
    draw = figure.add_vline if axis == "x" else figure.add_hline
    draw(**{axis: at}, line={"color": ALARM, "width": 1.5, "dash": "dash"}, **where)
    if not label:
        return
    place = {"xref": figure.layout.shapes[-1].xref, "yref": figure.layout.shapes[-1].yref}
    value = math.log10(at) if log else at  # annotations need the logarithm
    place |= {"x": value, "y": 1, "xanchor": "left"} if axis == "x" else {"x": 0, "y": value, "xanchor": "left"}
    figure.add_annotation(text=label, font_color=ALARM, showarrow=False, yanchor="bottom", **place)


def whiskers(values: Sequence[float], lows: Sequence[float], highs: Sequence[float], **look: Any) -> dict[str, Any]:
    """Return `error_x` or `error_y` for intervals around values."""
    ends = {
        "array": [high - value for value, high in zip(values, highs, strict=True)],
        "arrayminus": [value - low for value, low in zip(values, lows, strict=True)],
    }
    return {"type": "data", "symmetric": False, **ends, **look}


def legend_once(figure: go.Figure) -> None:
    """Show each name in the legend once, for its marks in all panels."""
    seen: set[str] = set()
    for trace in figure.data:
        if trace.name:
            trace.update(legendgroup=trace.name, showlegend=trace.name not in seen)
            seen.add(trace.name)


def _on_hover(hover: str | None) -> dict[str, Any]:
    return {"hoverinfo": "skip"} if hover is None else {"hovertemplate": hover}
