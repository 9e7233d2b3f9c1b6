"""Figures of the Frontier page: speed per user, throughput per GPU and cost of each engine."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from tokentwin.calibration.trust import EXTRAPOLATED, UNKNOWN
from tokentwin.dashboard.palette import MARKS, NEUTRAL, SERIES, dots, empty, finish, line, symbols
from tokentwin.planning.plan.document import EngineCurve, RatePoint, Recommendation
from tokentwin.serving.answers.figures import shown_number

STAR = "the recommended fleet"
_HEIGHT = 440
_APART = 0.06, 0.04  # minimum distance of two numbers, as shares of the axes, on a telephone
_PLOT_PX, _NAME_PX = 350, 16  # height between the axes, and height of a name, about
_UNITS = {"tok_s_gpu": "{} tokens/s per GPU", "usd_per_mtok_out": "${} per million output tokens"}


def frontier(curves: Sequence[EngineCurve], recommended: Recommendation | None) -> go.Figure:
    """Return tokens/s per GPU against tokens/s per user, from a light load to the highest rate within the SLOs."""
    return _curves(curves, recommended, "tok_s_gpu", "output tokens/s per GPU")


def price(curves: Sequence[EngineCurve], recommended: Recommendation | None) -> go.Figure:
    """Return dollars per million output tokens against tokens/s per user, over the same rates."""
    return _curves(curves, recommended, "usd_per_mtok_out", "$ per Mtok output")


def _curves(curves: Sequence[EngineCurve], recommended: Recommendation | None, y: str, title: str) -> go.Figure:
    """Return a line per engine, in the colour of its GPU; numbers beside its marks are requests at a time."""

    def usable(curve: EngineCurve) -> list[RatePoint]:
        points = [*curve.points, curve.planned] if curve.planned else curve.points  # the star lies on its line
        known = [p for p in points if getattr(p, y) is not None and p.tok_s_user is not None]
        return sorted(known, key=lambda p: p.requests_per_s)

    drawn = [curve for curve in curves if usable(curve)]
    if not drawn:
        if any(curve.points for curve in curves):
            return empty("Outputs of one token have no tokens/s per user", _HEIGHT)
        return empty("This plan was saved without these curves; plan again", _HEIGHT)
    figure = go.Figure()
    gpus = list(dict.fromkeys(curve.gpu for curve in drawn))
    colours = {gpu: SERIES[at % len(SERIES)] for at, gpu in enumerate(gpus)}
    marks = {gpu: MARKS[at % len(MARKS)] for at, gpu in enumerate(gpus)}
    named: set[str] = set()
    shown = [usable(curve) for curve in drawn]
    top = 1.15 * max(getattr(p, y) for points in shown for p in points)
    right = max(p.tok_s_user or 0 for points in shown for p in points)
    taken: list[tuple[float, float]] = []
    ends = [_end(curve, points) for curve, points in zip(drawn, shown, strict=True)]
    above = _above([_PLOT_PX * getattr(end, y) / top for end in ends])
    for curve, points, last, rise in zip(drawn, shown, ends, above, strict=True):
        line(
            figure,
            [p.tok_s_user for p in points],
            [getattr(p, y) for p in points],
            curve.gpu,
            colours[curve.gpu],
            "%{customdata}<extra></extra>",
            mode="lines+markers+text",
            marker={"size": 8, "symbol": symbols((p.level for p in points), marks[curve.gpu])},
            text=[_number(p, (p.tok_s_user or 0) / right, getattr(p, y) / top, taken) for p in points],
            textposition="top center",
            textfont={"size": 10, "color": NEUTRAL},
            customdata=[
                f"<b>{curve.engine}</b>, {shown_number(p.requests_per_s)} requests/s per replica, "
                f"{shown_number(p.concurrency)} concurrent requests"
                f"<br>{shown_number(p.tok_s_user or 0)} tokens/s of the median user"
                f"<br>{_UNITS[y].format(shown_number(getattr(p, y)))}"
                f"<br>{p.level or UNKNOWN}"
                for p in points
            ],
            legendgroup=curve.gpu,
            showlegend=curve.gpu not in named,
        )
        named.add(curve.gpu)
        figure.add_annotation(
            x=last.tok_s_user, y=getattr(last, y), text=curve.engine, font_color=colours[curve.gpu],
            showarrow=True, arrowhead=0, arrowcolor=colours[curve.gpu], ax=-24, ay=-rise, xanchor="right",
        )  # fmt: skip
    if any(p.level == EXTRAPOLATED for curve in drawn for p in curve.points):
        dots(figure, [None], [None], "hollow: extrapolated", NEUTRAL, None, marker={"symbol": "circle-open"})
    for curve in drawn:
        at = curve.planned
        if recommended is None or at is None or at.tok_s_user is None or getattr(at, y) is None:
            continue
        label = (
            f"<b>{recommended.replicas} \u00d7 {curve.engine}</b> at the planned traffic"
            f"<br>{shown_number(at.tok_s_user)} tokens/s of the median user"
            f"<br>{_UNITS[y].format(shown_number(getattr(at, y)))}"
        )
        star = {"symbol": symbols([at.level], "star")}
        place = [at.tok_s_user], [getattr(at, y)]
        dots(figure, *place, STAR, colours[curve.gpu], "%{customdata}<extra></extra>", 17, star, customdata=[label])
    figure.update_xaxes(title_text="tokens/s of the median user", rangemode="tozero")
    figure.update_yaxes(title_text=title, range=[0, top])
    return finish(figure, _HEIGHT)


def _end(curve: EngineCurve, points: Sequence[RatePoint]) -> RatePoint:
    """Return the point at the highest rate within the SLOs; without any, the planned one, which may lie beyond."""
    return next((point for point in reversed(points) if point is not curve.planned), points[-1])


def _number(point: RatePoint, x: float, y: float, taken: list[tuple[float, float]]) -> str:
    """Return the text for the requests at a time; empty if it is too near to one of `taken` (in shares of the axes)."""
    if any(abs(x - other) < _APART[0] and abs(y - level) < _APART[1] for other, level in taken):
        return ""
    taken.append((x, y))
    return f"{point.concurrency:,.0f}"


def _above(ends: Sequence[float]) -> list[float]:
    """Return the distance of each curve's name above the curve's end, in pixels, so that names do not overlap."""
    rises, last = [0.0] * len(ends), -float(_NAME_PX)
    for at in sorted(range(len(ends)), key=ends.__getitem__):
        last = max(ends[at] + _NAME_PX, last + _NAME_PX)
        rises[at] = last - ends[at]
    return rises
