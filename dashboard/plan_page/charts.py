"""Figures of the Plan page: attainment against replicas, latency against traffic, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tokentwin.dashboard.palette import (
    NEUTRAL,
    SERIES,
    SIMULATED,
    band,
    bars,
    empty,
    finish,
    line,
    log_axis,
    slo_line,
    symbols,
    tint,
)
from tokentwin.dashboard.slos import Bounds, bounds_of
from tokentwin.planning.plan.document import FleetPoint, Lengths, LoadPoint, PlanDocument
from tokentwin.planning.plan.frontier import Point
from tokentwin.planning.plan.offered_load import ClientsLoad, OverTime
from tokentwin.serving.answers.figures import shown_usd
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric

HEIGHT = 300
_TICKS = 5  # ticks of each axis of two that share a telephone's width
_TALL = 390  # height in pixels, as tall as the text beside the figure


def attainment(points: Sequence[FleetPoint], chosen: int) -> go.Figure:
    """Return the share of requests within every bound against replicas, with the 90 % band of the cost model."""
    if not points:
        return empty("No fleet meets the SLOs", HEIGHT)
    x = [p.replicas for p in points]
    figure = go.Figure()
    low, high = [100 * p.if_slow for p in points], [100 * p.if_fast for p in points]
    band(figure, x, high, low, "90 % interval", SIMULATED, 0.18)
    hover = "%{x} replicas: %{y:.1f} %, 90 % interval %{customdata[0]:.1f} to %{customdata[1]:.1f} %<extra></extra>"
    marker = {"size": [13 if n == chosen else 7 for n in x], "symbol": symbols(p.level for p in points)}
    y, ends = [100 * p.attainment for p in points], list(zip(low, high, strict=True))
    line(figure, x, y, "simulated", SIMULATED, hover, mode="lines+markers", marker=marker, customdata=ends)
    line(figure, x, low, "if steps are slow", SIMULATED, None, 1.5, "dash")
    figure.add_vline(x=chosen, line={"color": NEUTRAL, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="replicas", tickmode="array" if len(x) < 12 else "auto", tickvals=x)
    figure.update_yaxes(title_text="attainment (%)", range=[0, 103])
    return finish(figure, _TALL)


def latency(
    points: Sequence[LoadPoint], name: str, planned: float, knee: float, bounds: Mapping[float, str]
) -> go.Figure:
    """Return the p99 of a metric against the rate, with its named bounds (ms), the planned rate, and the knee.

    `knee` is the highest rate, in requests a second, at which every objective is met.
    """
    figure = go.Figure()
    x = [p.requests_per_s for p in points]
    y = [getattr(p, f"{name.removesuffix('_ms')}_p99_ms") for p in points]
    marker = {"size": 7, "symbol": symbols(p.level for p in points)}
    hover = "%{x:,.3~r} requests/s: %{y:,.4~r} ms<extra></extra>"
    line(figure, x, y, "as predicted", SIMULATED, hover, mode="lines+markers", marker=marker)
    slow = [getattr(p, f"{name.removesuffix('_ms')}_p99_if_slow_ms") for p in points]
    if any(slow):
        line(figure, x, slow, "if steps are slow", SIMULATED, f"if slow, {hover}", 1.5, "dash")
    known = [value for value in (*y, *slow) if value]
    highest = max([*known, *bounds], default=1.0)
    steep = bool(known) and highest > 20 * min(known)
    for bound, label in bounds.items():
        slo_line(figure, bound, label, "y", log=steep)
    for rate, dash in ((planned, "dot"), (knee, "solid")):
        figure.add_vline(x=rate, line={"color": NEUTRAL, "width": 1, "dash": dash})
    words = "planned = knee" if knee == planned else "planned"
    figure.add_annotation(x=planned, y=1, yref="paper", text=words, xanchor="right", yanchor="bottom", showarrow=False)
    if knee != planned:
        figure.add_annotation(x=knee, y=1, yref="paper", text="knee", xanchor="left", yanchor="bottom", showarrow=False)
    figure.update_xaxes(title_text="requests/s")
    figure.update_yaxes(title_text=f"{metric(name).label} p99 (ms)", type="log" if steep else "linear")
    if steep:
        figure.update_yaxes(dtick=1)
    else:
        figure.update_yaxes(range=[0, 1.1 * highest])
    return finish(figure, HEIGHT).update_layout(legend_y=1.13, margin_t=50)  # above the names of the rates


def latencies(answer: PlanDocument) -> dict[str, go.Figure]:
    """Return `latency` of TTFT and TPOT by metric; none if the plan's requests arrive all at once."""
    planned, best = answer.requests_per_s, answer.recommendation
    if planned is None or best is None or not answer.by_rate:
        return {}
    knee = planned * (1 + (best.headroom_percent or 0) / 100)
    bounds: Bounds = {}
    with suppress(UserError):  # a saved answer may hold any text
        bounds = bounds_of(answer.objectives)
    return {name: latency(answer.by_rate, name, planned, knee, bounds.get(name, {})) for name in ("ttft_ms", "tpot_ms")}


def prices(points: Sequence[Point], spares: int = 0) -> go.Figure:
    """Return dollars per million output tokens of fleets that meet the SLOs, the cheapest first."""
    ordered = list(reversed(points))
    figure = go.Figure()
    x, y = [p.usd_per_mtok_out for p in ordered], [p.called(spares) for p in ordered]
    colours = [SIMULATED if p is points[0] else tint(SIMULATED, 0.45) for p in ordered]
    hover = "%{y}: %{customdata[1]} GPUs, $%{customdata[0]:,.2f}/h<extra></extra>"
    costs = [(p.usd_per_hour, p.gpus) for p in ordered]
    text = {"text": [shown_usd(usd) for usd in x], "textposition": "outside", "cliponaxis": False}
    bars(figure, x, y, "", colours, hover, orientation="h", customdata=costs, **text)
    most = max(p.usd_per_mtok_out or 0 for p in ordered)
    figure.update_xaxes(title_text="$ per Mtok output", range=[0, 1.3 * most or 1])
    return finish(figure, 90 + 38 * max(len(points), 2), legend=False)


def lengths(histograms: Lengths) -> go.Figure:
    """Return the share of requests by length of prompts and outputs, on a logarithmic axis."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    for at, (name, histogram) in enumerate(histograms, start=1):
        edges = np.asarray(histogram.edges)
        hover, middle = "about %{x:,.0f} tokens: %{y:.1f} % of requests<extra></extra>", np.sqrt(edges[1:] * edges[:-1])
        bars(figure, middle, histogram.percent, name, SIMULATED, hover, width=np.diff(edges), row=1, col=at)
        seen = [tick for tick in log_axis(edges[0], edges[-1], _TICKS)["tickvals"] if edges[0] <= tick <= edges[-1]]
        ticks = seen if len(seen) > 1 else sorted({edges[0], edges[-1] - 1})
        axis = {"type": "log", "range": np.log10(edges[[0, -1]]).tolist(), "title_text": f"{name} (tokens)"}
        axis |= {
            "tickvals": ticks,
            "ticktext": [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks],
        }
        figure.update_xaxes(**axis, row=1, col=at)
    figure.update_yaxes(title_text="requests (%)", row=1, col=1)
    return finish(figure, 230, legend=False)


def over_time(traffic: OverTime | None) -> dict[str, go.Figure]:
    """Return the figure `over_time` of requests, tokens and sessions, and `turns` of a session's prompts, if known."""
    if traffic is None:
        return {}
    titles = ["requests/s", "tokens/s", *(["sessions"] if traffic.sessions else [])]
    figure = make_subplots(rows=1, cols=len(titles), horizontal_spacing=0.2 if len(titles) == 2 else 0.13)
    x = [traffic.period_s * (at + 0.5) for at in range(len(traffic.requests_per_s))]
    at_s = "at %{x:,.4~r} s"
    hover = f"{at_s}: %{{y:,.3~r}} requests/s<extra></extra>"
    line(figure, x, traffic.requests_per_s, "requests", SIMULATED, hover, shape="hvh", showlegend=False, row=1, col=1)
    prompts, outputs = traffic.prompt_tokens_per_s, traffic.output_tokens_per_s
    for name, y, colour, dash in (
        ("prompt tokens", prompts, SIMULATED, None),
        ("output tokens", outputs, SERIES[1], "dash"),
    ):
        hover = f"{name} {at_s}: %{{y:,.4~r}} a second<extra></extra>"
        line(figure, x, y, name, colour, hover, dash=dash, shape="hvh", row=1, col=2)
    if traffic.sessions:
        hover = f"{at_s}: %{{y:,}} sessions<extra></extra>"
        line(figure, x, traffic.sessions, "", SIMULATED, hover, shape="hvh", showlegend=False, row=1, col=3)
    figure.update_xaxes(title_text="s", range=[0, traffic.period_s * len(x)])
    for at, title in enumerate(titles, start=1):
        figure.update_yaxes(title_text=title, rangemode="tozero", row=1, col=at)
    drawn = {"over_time": finish(figure, 260)}
    if traffic.prompt_tokens_of_turn:
        drawn["turns"] = go.Figure()
        turns = [at + 1 for at in range(len(traffic.prompt_tokens_of_turn))]
        hover = "turn %{x}: %{y:,.4~r} tokens<extra></extra>"
        bars(drawn["turns"], turns, traffic.prompt_tokens_of_turn, "", SIMULATED, hover)
        drawn["turns"].update_xaxes(title_text="turn")
        drawn["turns"].update_yaxes(title_text="prompt (tokens)")
        finish(drawn["turns"], 230, legend=False)
    return drawn


def clients(load: ClientsLoad, slowest_s: float | None) -> go.Figure:
    """Return what clients send against the mean time of an answer; `slowest_s` is the longest that the SLOs allow."""
    end = 2 * (slowest_s or max(load.think_s, 5.0))
    x = np.linspace(0 if load.think_s else end / 100, end, 101).tolist()
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    amounts = ((load.requests_per_s, "requests/s"), (load.in_flight, "requests in flight"))
    for at, (amount, unit) in enumerate(amounts, start=1):
        figure.update_yaxes(title_text=unit, row=1, col=at)
        hover = f"answers in %{{x:,.3~r}} s: %{{y:,.3~r}} {unit}<extra></extra>"
        line(figure, x, list(map(amount, x)), "", SIMULATED, hover, row=1, col=at)
        if slowest_s:
            slo_line(figure, slowest_s, "SLOs", row=1, col=at)
    figure.update_xaxes(title_text="mean time of an answer (s)", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return finish(figure, 260, legend=False)
