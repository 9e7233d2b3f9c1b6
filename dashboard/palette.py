"""One visual language for every figure: blue is simulated, orange is real, everywhere.

The colours hold on a light and on a dark background. Fonts, grid lines and backgrounds are left to the theme of
the page, so that a figure follows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go

from calibration.provenance import EXTRAPOLATED

SIMULATED = "#3b7ddd"
REAL = "#e8822a"
NEUTRAL = "#8592a6"
ALARM = "#d9534f"

# Orange is not among them: it is real.
POLICY = {
    "vllm": SIMULATED,
    "static": "#8592a6",
    "prefill-first": "#a8744a",
    "sarathi": "#18936f",
    "sjf": "#8b5cd6",
    "priority-ageing": "#d24f8e",
    "edf": "#0e9fb0",
    "fair": "#a0971c",
}

# A policy of a user's own gets one of these, so that it is never taken for another.
OWN_POLICY = ("#c2557f", "#5b8f2a", "#5f6b7d", "#b5651d", "#3b8ea5", "#7a5cc2")

CLOCK = {"virtual": SIMULATED, "wall": REAL}
CLOCK_NAME = {"virtual": "simulated", "wall": "real"}


def policy_colour(name: str) -> str:
    """The colour of a scheduling policy, wherever it is drawn; one of a user's own always gets the same."""
    return POLICY.get(name) or OWN_POLICY[zlib.crc32(name.encode()) % len(OWN_POLICY)]


def run_colour(run: Mapping[str, Any]) -> str:
    """Of a recorded run, by its row of `runs`: blue for a simulated one, orange for a real one."""
    return CLOCK.get(run["clock"], NEUTRAL)


def symbols(marks: Iterable[str], symbol: str = "circle") -> list[str]:
    """A marker for each point by its mark: hollow is extrapolated, on every page."""
    return [f"{symbol}-open" if mark == EXTRAPOLATED else symbol for mark in marks]


def tint(colour: str, alpha: float) -> str:
    """A `#rrggbb` colour, made transparent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def pale(colour: str) -> str:
    """A `#rrggbb` colour halfway to white: solid, so that text on it stays legible in either theme."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02x}" for i in (1, 3, 5))


def finish(figure: go.Figure, height: int, legend: bool = True) -> go.Figure:
    """What all figures share: margins, a legend above the plot, on the left since the mode bar is on the right."""
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
    """A figure that says why it has nothing to show."""
    figure = go.Figure()
    figure.add_annotation(text=message, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", opacity=0.7)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return finish(figure, height, legend=False)
