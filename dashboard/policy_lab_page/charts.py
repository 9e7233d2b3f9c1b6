"""Figures of the Policy lab: two sides in one plot, and the differences between them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from textwrap import wrap
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tokentwin.dashboard.cdf_panels import Line, cdf_panels
from tokentwin.dashboard.palette import (
    NEUTRAL,
    REAL,
    SIMULATED,
    bars,
    dots,
    empty,
    finish,
    legend_once,
    line,
    pale,
    policy_colour,
    tint,
    whiskers,
)
from tokentwin.planning.compare.document import SHARES, Cdfs, Ranked, Row, SimulatedError, Tally, Tenant, unit_of
from tokentwin.serving.answers.figures import shown_band, shown_number
from tokentwin.serving.metrics import METRICS, label_of

HEIGHT = 320
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_ROW = 27  # height of a row in pixels
_LETTERS = 16  # letters in a line beside a plot
_CHANGE = "B - A (%)"  # percent of A; the label of a row in points says so
_ENDS = attrgetter("low"), attrgetter("high")
_CLAIM = 36  # height of a claim, beside two plots above one another


class Sides(NamedTuple):
    """A pair of names, or of colours."""

    a: str
    b: str


def side_colours(a: str, b: str) -> Sides:
    """Return the colours of two policies; if the policies are the same, B is paler."""
    first, second = policy_colour(a), policy_colour(b)
    return Sides(first, pale(first) if second == first else second)


def cdfs(curves: Cdfs, names: Sides, colours: Sides, bounds: Sequence[tuple[str, float]] = ()) -> go.Figure:
    """Return the distributions of TTFT, TPOT and E2E on both sides, B dashed, with the SLOs' bounds in ms."""
    lines = [
        Line({m: (curve.x, curve.y) for m, curve in side_curves}, f"{side.upper()}: {name}", colour, dash=dash)
        for (side, side_curves), name, colour, dash in zip(curves, names, colours, (None, "dash"), strict=True)
    ]
    return cdf_panels(lines, LATENCIES, HEIGHT, bounds)


def differences(rows: Sequence[Row], colours: Sides) -> go.Figure:
    """Return B against A in percent of A (shares in points), with simultaneous intervals; grey is undecided."""
    shown = [row for row in rows if row.percent is not None]
    if not shown:
        return empty("Nothing to compare", HEIGHT)
    colour_by_side = {"A": colours.a, "B": colours.b, "": tint(NEUTRAL, 0.6)}
    figure = go.Figure()
    for better, title in (("B", "B is better"), ("A", "A is better"), ("", "no clear difference")):
        mine = [row for row in shown if row.better == better]
        if not mine:
            continue
        x, y = [row.percent or 0.0 for row in mine], [_of_change(row) for row in mine]
        lows, highs = ([at + _percent(row, end(row)) for at, row in zip(x, mine, strict=True)] for end in _ENDS)
        around = whiskers(x, lows, highs, color=colour_by_side[better], thickness=2, width=4)
        mark = "square" if better == "A" else "circle"  # beside the colour
        look = {"symbol": ["diamond" if row.low is None else mark for row in mine]}
        hover = "<b>%{y}</b>: %{x:+.1f}<br>%{customdata}<extra></extra>"
        dots(
            figure,
            x,
            y,
            title,
            colour_by_side[better],
            hover,
            9,
            look,
            error_x=around,
            customdata=list(map(_hover, mine)),
        )
    figure.add_vline(x=0, line={"color": NEUTRAL, "width": 1})
    figure.update_xaxes(title_text=_CHANGE, zeroline=False)
    figure.update_yaxes(
        categoryorder="array", categoryarray=[_of_change(row) for row in reversed(shown)], title_text=None
    )
    return finish(figure, 100 + _CLAIM * len(shown))


def label(row: Row | SimulatedError | Ranked) -> str:
    """Return the name of a row, such as `TTFT p99`."""
    if row.metric == "finished":
        return "requests that finish"
    name = label_of(row.metric)
    return name if row.stat == "value" else f"{name} {row.stat}"


def _percent(row: Row, end: float | None) -> float:
    """Return the distance of an end of the interval from the point, in the unit of `percent`; 0 without an interval."""
    whole = 1.0 if row.metric in SHARES else row.a
    if end is None or row.a is None or row.b is None or not whole:
        return 0.0
    return float(100 * (end - (row.b - row.a)) / abs(whole))


def _of_change(row: Row | Ranked) -> str:
    """Return `label` in short lines, with `(points)` where the difference is not in percent of A."""
    title = f"{label(row)} (points)" if row.metric in SHARES else label(row)
    return "<br>".join(wrap(title, _LETTERS))


def _hover(row: Row) -> str:
    values = f"A {shown_number(row.a, 4)}, B {shown_number(row.b, 4)} {unit_of(row)}"
    if row.low is None:
        return f"{values}<br>no interval"
    return f"{values}<br>B - A: {shown_band(row.low, row.high, 4)} {unit_of(row)}"


def winners(tallies: Sequence[Tally], colours: Sides) -> go.Figure:
    """Return the share of requests that B, or A, serves better by the threshold: all, and by tenant and SLO class."""
    judged = list(dict.fromkeys(tally.metric for tally in tallies))
    figure = make_subplots(rows=len(judged), shared_xaxes=True, vertical_spacing=0.08)
    for at, name in enumerate(judged, start=1):
        mine = [tally for tally in reversed(tallies) if tally.metric == name]
        counts = [max(tally.gain + tally.same + tally.lose, 1) for tally in mine]
        kinds = (("gain", "B better", colours.b), ("same", "same", tint(NEUTRAL, 0.4)))
        for kind, title, colour in (*kinds, ("lose", "A better", colours.a)):
            counted = [(getattr(tally, kind), count) for tally, count in zip(mine, counts, strict=True)]
            hover = "%{y}: %{customdata[0]:,} of %{customdata[1]:,} (%{x:.1f} %)"
            where: dict[str, Any] = {"orientation": "h", "row": at, "col": 1}
            shares, groups = [100 * number / count for number, count in counted], list(map(_group, mine))
            bars(figure, shares, groups, title, colour, hover, customdata=counted, **where)
        figure.update_yaxes(title_text=f"by {METRICS[name].label}", row=at, col=1)
    legend_once(figure)
    figure.update_xaxes(range=[0, 100])
    figure.update_xaxes(title_text="requests (%)", row=len(judged), col=1)
    figure.update_layout(barmode="stack")
    finish(figure, 110 + max(_ROW * len(tallies), 70 * len(judged)))
    return figure.update_layout(legend_traceorder="normal")


def _group(tally: Tally) -> str:
    kind = {"tenant": "tenant", "slo_class": "class"}.get(tally.by)
    return f"{kind} {tally.group or '(none)'}" if kind else "all"


def shares(tenants: Sequence[Tenant], names: Sides, colours: Sides) -> go.Figure:
    """Return each tenant's share of the requests, and of the tokens that each side served before the last arrival."""
    figure = go.Figure()
    served = [("requests", "requests sent", tint(NEUTRAL, 0.4))]
    served += [
        (side, f"{side.upper()}: {name}", colour) for side, name, colour in zip("ab", names, colours, strict=True)
    ]
    for key, name, colour in served:
        shares_of = [getattr(tenant, key) for tenant in tenants]
        bars(figure, [tenant.tenant for tenant in tenants], shares_of, name, colour, "%{x}: %{y:.1f} %")
    figure.update_xaxes(title_text="tenant", type="category")
    figure.update_yaxes(title_text="share (%)", rangemode="tozero")
    return finish(figure, 250)


def ranking(rows: Sequence[Ranked]) -> go.Figure:
    """Return the simulated and the real difference of every row in which either is shown: blue and orange."""
    shown = [row for row in rows if row.simulated_percent is not None and row.real_percent is not None]
    if not shown:
        return empty("Neither the simulation nor the real runs show a difference", 160)
    y = [f"{_of_change(row)}: {row.outcome}" for row in shown]
    figure = go.Figure()
    for row, name in zip(shown, y, strict=True):
        ends = [row.simulated_percent, row.real_percent]
        line(figure, ends, [name] * 2, "", tint(NEUTRAL, 0.6), None, showlegend=False)
    for key, name, colour in (("simulated_percent", "simulated", SIMULATED), ("real_percent", "real", REAL)):
        dots(figure, [getattr(row, key) for row in shown], y, name, colour, "%{y}<br>%{x:+.1f}", 10)
    figure.add_vline(x=0, line={"color": NEUTRAL, "width": 1})
    figure.update_xaxes(title_text=_CHANGE, zeroline=False)
    figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(y)), title_text=None)
    return finish(figure, 110 + _ROW * len(shown))
