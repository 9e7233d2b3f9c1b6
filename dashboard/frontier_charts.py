"""Figures of the Frontier page: every fleet that a plan simulated, by what users, GPUs and the money get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from calibration.standing import UNKNOWN
from dashboard.palette import NEUTRAL, SIMULATED, finish, symbols
from serving.metrics import metric
from tokentwin.planning.frontier import per_dollar, per_gpu, unbeaten

Points = Sequence[Mapping[str, Any]]
_USER = "output tokens/s of the median user"


def frontier(points: Points, recommended: int | None) -> go.Figure:
    """Tokens a second of a GPU against those of a user; a line joins those that no other beats."""
    figure = _scatter(points, "tok_s_gpu", recommended)
    _join(figure, points, unbeaten(points, per_gpu), "tok_s_gpu")
    figure.update_xaxes(title_text=_USER, rangemode="tozero")
    figure.update_yaxes(title_text="output tokens/s of a GPU", rangemode="tozero")
    return finish(figure, 440)


def price(points: Points, recommended: int | None) -> go.Figure:
    """Dollars per million output tokens against tokens a second of a user; a line joins those that no other beats."""
    figure = _scatter(points, "usd_per_mtok_out", recommended)
    _join(figure, points, unbeaten(points, per_dollar), "usd_per_mtok_out")
    figure.update_xaxes(title_text=_USER, rangemode="tozero")
    figure.update_yaxes(title_text="$ per million output tokens", rangemode="tozero")
    return finish(figure, 440)


def place(points: Points, point: Mapping[str, Any]) -> int:
    """Which of the points is of the same fleet."""
    same = ("engine", "replicas")
    return next(at for at, other in enumerate(points) if all(other[name] == point[name] for name in same))


def ranked(points: Points, recommended: int | None) -> list[int]:
    """The recommended one, then those that meet the SLOs, then the others, each from the cheapest on."""

    def rank(at: int) -> tuple[bool, bool, float, int]:
        return at != recommended, not points[at]["met"], points[at]["usd_per_hour"], points[at]["gpus"]

    return sorted(range(len(points)), key=rank)


def on_a_frontier(points: Points) -> set[int]:
    """Those on the line of either figure."""
    return {*unbeaten(points, per_gpu), *unbeaten(points, per_dollar)}


def _join(figure: go.Figure, points: Points, best: Sequence[int], y: str) -> None:
    figure.add_scatter(
        x=[points[at]["tok_s_user"] for at in best],
        y=[points[at][y] for at in best],
        mode="lines",
        line={"color": SIMULATED, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
        name="frontier",
    )


def _scatter(points: Points, y: str, recommended: int | None) -> go.Figure:
    """Those that meet the SLOs in blue, the rest grey, hollow if extrapolated; every mark knows which point it is."""
    figure = go.Figure()
    kinds = (
        ("breaks the SLOs", NEUTRAL, "circle", 9, lambda at: not points[at]["met"]),
        ("meets the SLOs", SIMULATED, "circle", 10, lambda at: points[at]["met"] and at != recommended),
        ("recommended", SIMULATED, "star", 17, lambda at: at == recommended),
    )
    for name, colour, symbol, size, belongs in kinds:
        mine = [at for at in range(len(points)) if belongs(at) and points[at][y] is not None]
        if not mine:
            continue
        figure.add_scatter(
            x=[points[at]["tok_s_user"] for at in mine],
            y=[points[at][y] for at in mine],
            mode="markers",
            marker={
                "color": colour,
                "symbol": symbols((points[at] for at in mine), symbol),
                "size": size,
            },
            customdata=[
                (
                    at,
                    points[at]["gpus"],
                    points[at]["usd_per_hour"],
                    100 * points[at]["attainment"],
                    points[at].get("mark", UNKNOWN),
                )
                for at in mine
            ],
            text=[f"{points[at]['replicas']} × {points[at]['engine']}" for at in mine],
            hovertemplate="%{text}: %{customdata[1]} GPUs, $%{customdata[2]:,.2f}/h, "
            f"%{{customdata[3]:.1f}} % attained<br>%{{x:,.3g}} {metric('tok_s_user').unit}, %{{y:,.3g}}<br>"
            "%{customdata[4]}<extra></extra>",
            name=name,
        )
    return figure
