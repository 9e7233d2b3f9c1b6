"""Predictions for published engines: the error of every figure, by source, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tokentwin.dashboard.palette import NEUTRAL, REAL, SIMULATED, dots, empty, finish, legend_once, line
from tokentwin.dashboard.trust_page.results import Column, Figure, Source
from tokentwin.serving.answers.figures import shown_number

_RATES = ("request_throughput", "output_throughput", "total_throughput", "makespan_s", "saturated")
_FAMILIES = (  # beginnings of figures' names, by their panel
    ("TTFT", ("ttft_ms",)),
    ("TPOT", ("tpot_ms",)),
    ("E2E", ("e2e_ms",)),
    ("throughput, makespan", _RATES),
    ("steps", ("p50_ms", "p95_ms", "total_s")),  # targets for steps are about single steps, not about these figures
)
_EDGE = 60.0  # percent at which the axis ends; larger errors are drawn at its edge
_SPREAD = 0.32  # share of a row's height, so that dots do not hide each other


def errors_by_source(cases: Sequence[Source], column: Column) -> go.Figure:
    """Return a dot for each figure, a panel for each kind, a row for each source; short lines are the targets."""
    shown = [(title, names) for title, names in _FAMILIES if any(_rows(case, names, column) for case in cases)]
    if not shown:
        return empty("No source has such figures", 300)
    titles = [title for title, _ in shown]
    figure = make_subplots(cols=len(shown), shared_yaxes=True, horizontal_spacing=0.02, subplot_titles=titles)
    for at, (_, names) in enumerate(shown, start=1):
        for place, case in enumerate(cases):
            rows = _rows(case, names, column)
            for covered in (True, False):
                mine = [row for row in rows if (row.covered or column == "anchored") == covered]
                _dots(figure, at, place, case, mine, column, covered)
            _targets(figure, at, place, case, names, column)
        figure.update_xaxes(
            title_text="error (%)",
            range=[-_EDGE * 1.08, _EDGE * 1.08],
            tickvals=[-50, -25, 0, 25, 50],
            zeroline=True,
            zerolinecolor=NEUTRAL,
            row=1,
            col=at,
        )
    legend_once(figure)
    figure.update_yaxes(
        tickvals=list(range(len(cases))),
        ticktext=[case.name for case in cases],
        range=[len(cases) - 0.45, -0.55],
        showgrid=False,
        zeroline=False,
    )
    finish(figure, 110 + 62 * len(cases))
    figure.update_layout(margin_t=64, legend_y=1.14)
    return figure


def _rows(case: Source, names: Sequence[str], column: Column) -> list[Figure]:
    return [row for row in case.rows if row.figure.split(".")[0] in names and row.error_pct(column) is not None]


def _dots(
    figure: go.Figure,
    at: int,
    place: int,
    case: Source,
    mine: Sequence[Figure],
    column: Column,
    covered: bool,
) -> None:
    if not mine:
        return
    mine = sorted(mine, key=lambda row: abs(row.error_pct(column) or 0) > _EDGE)  # the first is in the legend
    errors = np.array([row.error_pct(column) for row in mine], dtype=np.float64)
    beyond = np.abs(errors) > _EDGE
    edge = np.where(errors > 0, "triangle-right", "triangle-left")
    if column == "anchored":
        name = "anchored"
    elif covered:
        name = "in the 90 % band"
    else:
        name = "outside the band"
    size, opacity = (6, 0.85) if len(mine) < 60 else (4.5, 0.5)
    labels = [
        (row.run, row.figure, shown_number(row.measured, 4), shown_number(getattr(row, column), 4), f"{error:+.1f}")
        for row, error in zip(mine, errors, strict=True)
    ]
    dots(
        figure,
        np.clip(errors, -_EDGE, _EDGE),
        place + _SPREAD * _spread(len(mine), covered),
        name,
        SIMULATED if covered else NEUTRAL,
        f"<b>{case.name}</b>, %{{customdata[0]}}<br>%{{customdata[1]}}: measured %{{customdata[2]}}, "
        "predicted %{customdata[3]} (%{customdata[4]} %)<extra></extra>",
        size,
        {"opacity": opacity, "symbol": np.where(beyond, edge, "circle")},
        customdata=labels,
        row=1,
        col=at,
    )


def _targets(figure: go.Figure, at: int, place: int, case: Source, names: Sequence[str], column: Column) -> None:
    bounds = {t.within_pct for t in case.targets if t.column == column and t.figure.split(".")[0] in names}
    ends: list[Any] = [end for bound in sorted(bounds) if 0 < bound <= _EDGE for end in (-bound, bound)]
    if not ends:
        return
    x = [x for end in ends for x in (end, end, None)]
    y = [y for _ in ends for y in (place - 0.42, place + 0.42, None)]
    line(figure, x, y, "target", REAL, "within ± %{x:.4~g} %<extra>target</extra>", row=1, col=at)


def _spread(count: int, covered: bool) -> np.ndarray[Any, Any]:
    """Return places across the row, the same every time: multiples of the golden ratio, which never cluster."""
    return 2.0 * ((np.arange(count) + (0.5 if covered else 0.0)) * 0.6180339887498949 % 1.0) - 1.0
