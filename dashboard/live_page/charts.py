"""Figures of the Live page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tokentwin.dashboard.live_page.snapshot import (
    GAUGES,
    LATENCIES,
    Snapshot,
    quantile,
    tokens_per_second,
    values_between,
)
from tokentwin.dashboard.palette import (
    OWN_POLICY,
    SERIES,
    SIMULATED,
    bars,
    finish,
    legend_once,
    line,
    phase_colours,
    slo_line,
)
from tokentwin.dashboard.series import thin
from tokentwin.dashboard.slos import Bounds
from tokentwin.serving.answers.figures import shown_time

_QUANTILES = (0.5, 0.9, 0.99)
_WINDOW_S = 30.0  # latencies are of requests within this time
_POINTS = 150  # quantiles in one line
_COLOURS = phase_colours(SIMULATED)
_PHASES = {
    "tokenise": ("received_ns", "arrival_ns", SERIES[2]),
    "queue": ("arrival_ns", "scheduled_ns", _COLOURS["queue"]),
    "prefill": ("scheduled_ns", "first_token_ns", _COLOURS["prefill"]),
    "decode": ("first_token_ns", "finish_ns", _COLOURS["decode"]),
    "detokenise": ("finish_ns", "last_text_ns", SERIES[2]),
    "stream": ("last_text_ns", "last_sent_ns", SERIES[1]),
}


def over_time(history: Sequence[Snapshot]) -> go.Figure:
    """Return requests running and waiting, KV in use, and tokens a second; with one line per replica."""
    place: dict[str, Any]
    titles = [*GAUGES.values(), "output (tokens/s)"]
    plot = make_subplots(2, 2, subplot_titles=titles, vertical_spacing=0.18)
    times = [snapshot.seconds for snapshot in history]
    replicas = history[-1].replicas
    for at, gauge in enumerate(GAUGES):
        for number, replica in enumerate(replicas):
            scale = 100 if gauge.endswith("perc") else 1
            values = [scale * snapshot.values.get((gauge, replica), 0.0) for snapshot in history]
            colour = SIMULATED if len(replicas) == 1 else OWN_POLICY[number % len(OWN_POLICY)]
            hover = f"replica {replica}: %{{y:,.3~r}}<extra></extra>"
            place = {"row": at // 2 + 1, "col": at % 2 + 1}
            line(plot, times, values, f"replica {replica}", colour, hover, shape="hv", showlegend=at == 0, **place)
    line(
        plot,
        *tokens_per_second(history),
        "",
        SIMULATED,
        "%{y:,.0f} tokens/s<extra></extra>",
        row=2,
        col=2,
        showlegend=False,
    )
    plot.update_yaxes(rangemode="tozero")
    plot.update_yaxes(range=[0, 100], ticksuffix=" %", row=2, col=1)
    plot.update_xaxes(title="time on this page (s)", row=2)
    return finish(plot, 480, legend=len(replicas) > 1)


def latencies(history: Sequence[Snapshot], bounds: Bounds) -> go.Figure | None:
    """Return p50 and p99 of each latency over time, each of the last half minute, with the `bounds` of the SLOs.

    None before the server has answered a request.
    """
    if len(history) < 2:
        return None
    begins = _begins(history)
    kept = [at for at in (thin(len(history) - 1, _POINTS) + 1).tolist() if begins[at] < at]
    curves = {
        name: {share: [quantile(history[begins[at]], history[at], name, share) for at in kept] for share in (0.5, 0.99)}
        for name in LATENCIES
    }
    shown = [name for name, both in curves.items() if any(both[0.5])]
    if not shown:
        return None
    plot = make_subplots(-(-len(shown) // 2), min(len(shown), 2), vertical_spacing=0.2, horizontal_spacing=0.12)
    times = [history[at].seconds for at in kept]
    for number, name in enumerate(shown):
        where: dict[str, Any] = {"row": number // 2 + 1, "col": number % 2 + 1}
        for share, dash in ((0.5, None), (0.99, "dot")):
            curve = curves[name][share]
            values = [value.ms if value else None for value in curve]
            said = [f"p{100 * share:g} {value}" if value else "" for value in curve]
            look: dict[str, Any] = {"dash": dash, "text": said, **where}
            line(plot, times, values, f"p{100 * share:g}", SIMULATED, "%{text}<extra></extra>", **look)
        for ms, label in bounds.get(f"{LATENCIES[name].lower()}_ms", {}).items():
            slo_line(plot, ms, label, "y", **where)
        plot.update_yaxes(title_text=f"{LATENCIES[name]} (ms)", rangemode="tozero", **where)
    legend_once(plot)
    plot.update_xaxes(title="time on this page (s)", row=-(-len(shown) // 2))
    return finish(plot, 60 + 180 * -(-len(shown) // 2))


def _begins(history: Sequence[Snapshot]) -> list[int]:
    """Return for each snapshot the index of the first one within the half minute before it."""
    begins, first = [], 0
    for snapshot in history:
        while history[first].seconds < snapshot.seconds - _WINDOW_S:
            first += 1
        begins.append(first)
    return begins


def latency_rows(history: Sequence[Snapshot]) -> list[dict[str, str]]:
    """Return the number of values, the mean, p50, p90 and p99 of each latency over the last half minute, with units.

    Without values they are empty.
    """
    before, after = history[_begins(history)[-1]], history[-1]
    rows = []
    for name, shown in LATENCIES.items():
        count = values_between(before, after, name)
        seconds = after.total(f"{name}_sum") - before.total(f"{name}_sum")
        row = {"latency": shown, "values": f"{count:,.0f}", "mean": shown_time(1e3 * seconds / count) if count else ""}
        for share in _QUANTILES:
            row[f"p{100 * share:g}"] = str(quantile(before, after, name, share) or "")
        rows.append(row)
    return rows


def waterfall(journey: Mapping[str, Any]) -> go.Figure:
    """Return the phases of one request, and the steps in which it took part, in ms since the server received it."""
    times, plot, origin = journey["times"], go.Figure(), journey["times"]["received_ns"]
    for name, (begin, end, colour) in _PHASES.items():
        if times.get(begin) is not None and times.get(end) is not None:
            _bar(plot, name, name, [times[begin] - origin], [times[end] - times[begin]], colour, [""])
    steps = journey["steps"]
    said = [f"step {step['step']}: {step['rows']} requests, {step['tokens']} tokens" for step in steps]
    begins = [step["start_ns"] - origin for step in steps]
    took = [step["end_ns"] - step["start_ns"] for step in steps]
    _bar(plot, "steps", "steps", begins, took, SIMULATED, said)
    plot.update_layout(barmode="overlay")
    plot.update_xaxes(title="ms since the server received the request")
    plot.update_yaxes(autorange="reversed")
    return finish(plot, 330, legend=False)


def _bar(
    plot: go.Figure, row: str, name: str, begins: Sequence[int], took: Sequence[int], colour: str, said: Sequence[str]
) -> None:
    hover = "%{customdata}<br>from %{base:.2f} ms, %{x:.2f} ms long<extra></extra>"
    milliseconds = [ns / 1e6 for ns in took]
    base = [ns / 1e6 for ns in begins]
    look = {"orientation": "h", "base": base, "customdata": said, "marker_line_width": 0.5}
    bars(plot, milliseconds, [row] * len(begins), name, colour, hover, **look)


def mates(journey: Mapping[str, Any]) -> go.Figure:
    """Return the number of requests in each step of one request, and the KV blocks that it held in the step."""
    steps = journey["steps"]
    begins = [(step["start_ns"] - journey["times"]["received_ns"]) / 1e6 for step in steps]
    plot = make_subplots(1, 2, subplot_titles=["requests in the same step", "KV blocks of this request"])
    line(plot, begins, [step["rows"] for step in steps], "", SIMULATED, "%{y} requests<extra></extra>", row=1, col=1)
    line(plot, begins, [step["blocks"] for step in steps], "", SIMULATED, "%{y} blocks<extra></extra>", row=1, col=2)
    plot.update_yaxes(rangemode="tozero")
    plot.update_xaxes(title="ms")
    return finish(plot, 240, legend=False)
