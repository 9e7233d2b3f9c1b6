"""Figures of the Frontier page: every fleet that a plan simulated, by what users, GPUs and the money get."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from calibration.provenance import UNKNOWN
from dashboard.palette import NEUTRAL, SIMULATED, finish, line, symbols
from planning.plan.frontier import Point, per_dollar, per_gpu, unbeaten
from serving.metrics import metric

Points = Sequence[Point]


def frontier(points: Points, recommended: int | None) -> go.Figure:
    """Tokens a second of a GPU against those of a user; a line joins those that no other beats."""
    return _joined(points, "tok_s_gpu", "output tokens/s per GPU", unbeaten(points, per_gpu), recommended)


def price(points: Points, recommended: int | None) -> go.Figure:
    """Dollars per million output tokens against tokens a second of a user; a line joins those that no other beats."""
    return _joined(points, "usd_per_mtok_out", "$ per million output tokens", unbeaten(points, per_dollar), recommended)


def _joined(points: Points, y: str, title: str, best: Sequence[int], recommended: int | None) -> go.Figure:
    figure = _scatter(points, y, recommended)
    ends = [points[at].tok_s_user for at in best], [getattr(points[at], y) for at in best]
    line(figure, *ends, "frontier", SIMULATED, None, 1.5, "dot")
    figure.update_xaxes(title_text="output tokens/s of the median user", rangemode="tozero")
    figure.update_yaxes(title_text=title, rangemode="tozero")
    return finish(figure, 440)


def _scatter(points: Points, y: str, recommended: int | None) -> go.Figure:
    """Those that meet the SLOs in blue, the rest grey, hollow if extrapolated; every mark knows which point it is."""
    figure = go.Figure()
    kinds = (
        ("breaks the SLOs", NEUTRAL, "circle", 9, lambda at: not points[at].met),
        ("meets the SLOs", SIMULATED, "circle", 10, lambda at: points[at].met and at != recommended),
        ("recommended", SIMULATED, "star", 17, lambda at: at == recommended),
    )
    for name, colour, symbol, size, belongs in kinds:
        mine = [at for at in range(len(points)) if belongs(at) and getattr(points[at], y) is not None]
        if not mine:
            continue
        figure.add_scatter(
            x=[points[at].tok_s_user for at in mine],
            y=[getattr(points[at], y) for at in mine],
            mode="markers",
            marker={"color": colour, "symbol": symbols((points[at].mark for at in mine), symbol), "size": size},
            customdata=[
                (at, points[at].gpus, points[at].usd_per_hour, 100 * points[at].attainment, points[at].mark or UNKNOWN)
                for at in mine
            ],
            text=[f"{points[at].replicas} × {points[at].engine}" for at in mine],
            hovertemplate="%{text}: %{customdata[1]} GPUs, $%{customdata[2]:,.2f}/h, "
            f"%{{customdata[3]:.1f}} % attainment<br>%{{x:,.3g}} {metric('tok_s_user').unit}, %{{y:,.3g}}<br>"
            "%{customdata[4]}<extra></extra>",
            name=name,
        )
    return figure
