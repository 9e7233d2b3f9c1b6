"""Figures of the Run page: one run over time, and the phases of single requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from tokentwin.dashboard.palette import (
    ALARM,
    NEUTRAL,
    bars,
    dots,
    empty,
    finish,
    line,
    pale,
    phase_colours,
    slo_line,
    tint,
)
from tokentwin.dashboard.run_page.fleet_over_time import FleetOverTime, Series
from tokentwin.dashboard.run_page.step_series import STATES, StepSeries
from tokentwin.dashboard.series import bucket_means, envelope, step_function_at, step_function_between, thin
from tokentwin.dashboard.slos import NO_BOUNDS, Bounds
from tokentwin.serving.answers.figures import shown_number, shown_share
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.tables import known

PHASES = ("queue", "prefill", "decode")
_SINCE_ARRIVAL = ("ttft_ms", "e2e_ms")  # metrics that begin at the arrival, as the drawn phases do
_SECONDS_FROM_MS = 2000  # mean time from which a bar of phases is in seconds
_DOTS = 700  # dots of one kind in a narrow figure
_SAMPLE = 200_000  # number of steps in a sample; more steps do not change a curve of 300 points


def timeline(
    steps: StepSeries,
    fleet: FleetOverTime,
    colour: str,
    window_s: tuple[float, float] | None = None,
    buckets: int = 600,
    used: Mapping[str, Series] | None = None,
) -> go.Figure:
    """Return queue, running, KV use and batch tokens over time; for a fleet also outstanding requests and replicas.

    `used` maps a name to the start of each step (ns) and the share of the GPUs' peak that the step used. `window_s` is
    the part of the run to show. KV use is a share of the blocks of all live replicas. Long runs are reduced to the
    lowest and the highest value of each time bucket, and to the mean for batch tokens.
    """
    if not len(steps):
        return empty("The recording has no steps", 260)
    waiting, running, blocks = steps.lows_and_highs(STATES, window_s, buckets)
    begin, end = (at * 1e9 for at in window_s or _span(waiting, fleet))
    changing = len(fleet.live[0]) > 1
    heights = [1, 1, 1, 1.2, *([0.6] if changing else []), *([1] if used else [])]
    figure = make_subplots(rows=len(heights), shared_xaxes=True, vertical_spacing=0.045, row_heights=heights)
    panels = [("waiting", waiting, "%{y:,.0f}"), ("running", running, "%{y:,.0f}")]
    panels.append(("KV use", _share_of_live(blocks, fleet), "%{y:,.1f} %"))
    for at, (label, (x, y), hover) in enumerate(panels, start=1):
        if len(x) and x[-1] < end:
            x, y = np.append(x, end), np.append(y, y[-1])
        _fill_steps(figure, at, label, x, y, colour, hover)
    _batches(figure, steps, colour, window_s, buckets)
    if fleet.outstanding is not None:
        x, y = envelope(*step_function_between(*fleet.outstanding, begin, end), buckets)
        name = "outstanding requests of the fleet"
        line(figure, x / 1e9, y, name, NEUTRAL, "%{y:,.0f}", 1.4, shape="hv", row=1, col=1)
    titles = ["waiting<br>(requests)", "running<br>(requests)", "KV use<br>(%)", "batch<br>(tokens/step)"]
    if changing:
        _fill_steps(figure, 5, "live replicas", *step_function_between(*fleet.live, begin, end), colour, "%{y:,.0f}")
        titles.append("live<br>(replicas)")
    if used:
        titles.append(f"{', '.join(used)}<br>(%)")
        _used(figure, len(titles), used, (begin, end), colour)
    for at, title in enumerate(titles, start=1):
        figure.update_yaxes(title_text=title, rangemode="tozero", row=at, col=1)
    figure.update_xaxes(title_text="time since the start of the run (s)", row=len(titles), col=1)
    if window_s is not None:
        figure.update_xaxes(range=list(window_s))
    figure.update_layout(hovermode="x unified")
    figure.update_layout(legend_itemsizing="constant")  # otherwise the dots in the legend are too small to see
    return finish(figure, 620 + 80 * changing + 120 * bool(used))


def _span(steps: Series, fleet: FleetOverTime) -> tuple[float, float]:
    """Return the first and the last second of all series; requests may come before any replica can run a step."""
    times = [series[0] for series in (steps, fleet.outstanding) if series is not None and len(series[0])]
    return min(at[0] for at in times) / 1e9, max(at[-1] for at in times) / 1e9


def _share_of_live(used: Series, fleet: FleetOverTime) -> Series:
    """Return used blocks in percent of the blocks of the replicas that live at the time, 0 while there are none."""
    if not len(used[0]):
        return used
    times = np.union1d(used[0], fleet.live[0][(fleet.live[0] > used[0][0]) & (fleet.live[0] < used[0][-1])])
    blocks = fleet.blocks * step_function_at(*fleet.live, times)
    return times, 100 * np.divide(step_function_at(*used, times), blocks, out=np.zeros(len(times)), where=blocks != 0)


def _fill_steps(
    figure: go.Figure, row: int, label: str, x: NDArray[Any], y: NDArray[Any], colour: str, hover: str
) -> None:
    """Draw a step function of times (ns), filled to zero."""
    filled: dict[str, Any] = {"fill": "tozeroy", "fillcolor": tint(colour, 0.14), "showlegend": False}
    line(figure, x / 1e9, y, label, colour, hover, 1.4, shape="hv", **filled, row=row, col=1)


def _batches(
    figure: go.Figure, steps: StepSeries, colour: str, window_s: tuple[float, float] | None, buckets: int
) -> None:
    """Draw the tokens of a step by kind, stacked in the fourth panel."""
    shades = {"prefill_tokens": phase_colours(colour)["prefill"], "decode_rows": colour, "draft_tokens": NEUTRAL}
    at_ns, batches = steps.batches(window_s)
    for name, batch in reversed(batches.items()):
        x, y = bucket_means(at_ns, batch, buckets)
        label = name.replace("_rows", " tokens").replace("_", " ")
        stacked: dict[str, Any] = {"stackgroup": "batch", "row": 4, "col": 1}
        line(figure, x / 1e9, y, label, shades[name], "%{y:,.1f}", 0, shape="hv", fillcolor=shades[name], **stacked)


def _used(figure: go.Figure, row: int, used: Mapping[str, Series], window_ns: tuple[float, float], colour: str) -> None:
    """Draw a dot in percent for each step, or for evenly spaced steps of a long run."""
    for (name, (at_ns, shares)), shade in zip(used.items(), (colour, pale(colour)), strict=False):
        inside = (at_ns >= window_ns[0]) & (at_ns <= window_ns[1]) & np.isfinite(shares)
        rows = _thin_where(inside, _DOTS)
        hover = f"{name} %{{y:.1f}} %"
        dots(figure, at_ns[rows] / 1e9, 100 * shares[rows], name, shade, hover, 3, row=row, col=1)


def waterfall(
    request: Mapping[str, Any], colour: str, preempted: Sequence[tuple[int, int]] = (), bounds: Bounds = NO_BOUNDS
) -> go.Figure:
    """Return one request from its intended arrival on: queue, prefill, decode, its tokens, and its preemptions.

    `request` is a row of `requests`; `preempted` are intervals in nanoseconds, if the recording has them. `bounds` on
    TTFT and E2E are lines.
    """
    stamps = [request.get(n) for n in ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns")]
    arrival = stamps[0]
    if arrival is None or stamps[1] is None:
        return empty(f"Request {request.get('request_id')} was never scheduled", 260)
    last = max(stamp for stamp in stamps if stamp is not None)
    unit, scale = ("s", 1e9) if last - arrival >= 10e9 else ("ms", 1e6)
    figure, rows = go.Figure(), list(PHASES)
    for phase, begin, end in zip(PHASES, stamps, stamps[1:], strict=False):
        if begin is not None and end is not None:
            length, share = shown_number((end - begin) / scale), (end - begin) / max(last - arrival, 1)
            text = f"{length} {unit} · {shown_share(share)}"
            hover = f"<b>{phase}</b>: {length} {unit} ({shown_share(share, 1)} of E2E)"
            x, shade = [(end - begin) / scale], phase_colours(colour)[phase]
            lies = {"orientation": "h", "base": [(begin - arrival) / scale], "text": text, "textposition": "auto"}
            bars(figure, x, [phase], phase, shade, f"{hover}<extra></extra>", **lies)
    tokens = request.get("token_times_ns")
    if tokens:
        kept = [tokens[i] for i in thin(len(tokens), 1000)]
        x, hover = [(at - arrival) / scale for at in kept], f"token at %{{x:,.4~r}} {unit}<extra></extra>"
        tick = {"symbol": "line-ns", "line": {"width": 1.2, "color": colour}}
        dots(figure, x, ["tokens"] * len(kept), "output tokens", colour, hover, 12, tick)
        rows.append("tokens")
    if preempted:
        x, base = [(end - begin) / scale for begin, end in preempted], [(at - arrival) / scale for at, _ in preempted]
        look = {"orientation": "h", "base": base, "marker_pattern": {"shape": "/", "fgcolor": ALARM}}
        hover = f"preempted for %{{x:,.4~r}} {unit}<extra></extra>"
        bars(figure, x, ["preempted"] * len(preempted), "preempted", tint(ALARM, 0.35), hover, **look)
        rows.append("preempted")
    for name in _SINCE_ARRIVAL:
        for ms in bounds.get(name, {}):
            slo_line(figure, ms * 1e6 / scale, f"{metric(name).label} SLO")
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], title_text=None, showgrid=False)
    figure.update_xaxes(title_text=f"time since intended arrival ({unit})", rangemode="tozero")
    figure.update_layout(barmode="overlay")
    return finish(figure, 90 + 42 * len(rows), legend=False)


def lifecycles(
    metrics: RunMetrics,
    gaps: str,
    values: NDArray[Any],
    prefill: NDArray[Any],
    colour: str,
    bounds: Bounds = NO_BOUNDS,
) -> dict[str, go.Figure]:
    """Return the figures of the four cards; `values` are gaps between tokens, by the metric `gaps`."""
    values_of = metrics.values
    shown_steps = np.concatenate([_thin_where(prefill == 0, _DOTS), _thin_where(prefill > 0, _DOTS)])
    few, some = metrics.at_steps(shown_steps).values, metrics.at_steps(thin(len(prefill), _SAMPLE)).values
    return {
        "Token": histogram(values, gaps, colour, bounds),
        "Compute": step_times(few("batch_tokens"), few("step_ms"), prefill[shown_steps], colour),
        "Memory": memory_shares(some("kv_usage"), some("kv_pressure"), some("step_ms"), colour),
        "Request": phases(values_of("queue_ms"), values_of("prefill_ms"), values_of("decode_ms"), colour, bounds),
    }


def histogram(values: NDArray[Any], name: str, colour: str, bounds: Bounds = NO_BOUNDS) -> go.Figure:
    """Return the histogram of a latency with median and p99, and its bounds; for ITL also those of TPOT, its mean.

    It is counted here, so only bars go to the browser.
    """
    values = known(values)
    if not len(values):
        return empty("no values", 230)
    p50, p99, top = np.percentile(values, (50, 99, 99.5), method="inverted_cdf")
    low = float(values.min())
    counts, edges = np.histogram(values, bins=36, range=(low, top if top > low else low + 1))
    beyond = int((values > edges[-1]).sum())
    figure = go.Figure()
    shares, hover = 100 * counts / len(values), "%{x:,.4~r} ms: %{y:.1f} %<extra></extra>"
    bars(figure, (edges[:-1] + edges[1:]) / 2, shares, "", colour, hover, width=np.diff(edges), marker_line_width=0)
    for at, statistic, dash, side in ((p50, "p50", "solid", "right"), (p99, "p99", "dot", "left")):
        figure.add_vline(x=at, line={"color": NEUTRAL, "dash": dash, "width": 1.5})
        label = {"text": statistic, "xanchor": side, "yanchor": "bottom", "showarrow": False}
        figure.add_annotation(x=at, y=1, yref="paper", **label)  # above the plot, where no bar is, and on either side
    for bounded in (name,) if name != "itl_ms" else (name, "tpot_ms"):
        for ms in bounds.get(bounded, {}):
            slo_line(figure, ms, f"{metric(bounded).label} SLO")
    beyond_note = f", {beyond:,} are longer" if beyond else ""
    figure.update_xaxes(title_text=f"{metric(name).axis}{beyond_note}")
    figure.update_yaxes(title_text="share (%)")
    return _card(figure, legend=False)


def step_times(batch_tokens: NDArray[Any], step_ms: NDArray[Any], prefill: NDArray[Any], colour: str) -> go.Figure:
    """Return the time of a step against its tokens; steps with prefill are apart from decode-only steps."""
    if not len(step_ms):
        return empty("no steps", 230)
    figure = go.Figure()
    for label, mask, shade in (("decode only", prefill == 0, colour), ("with prefill", prefill > 0, pale(colour))):
        chosen = _thin_where(mask, _DOTS)
        hover = "%{x:,} tokens: %{y:,.4~r} ms<extra></extra>"
        dots(figure, batch_tokens[chosen], step_ms[chosen], label, shade, hover, 5)
    figure.update_xaxes(title_text="batch tokens", rangemode="tozero")
    figure.update_yaxes(title_text=metric("step_ms").axis, rangemode="tozero")
    return _card(figure)


def memory_shares(kv_usage: NDArray[Any], kv_pressure: NDArray[Any], step_ms: NDArray[Any], colour: str) -> go.Figure:
    """Return the share of the busy time during which KV usage, and the demand for it, were above each level."""
    if not np.isfinite(kv_usage).any():
        return empty("no KV use recorded", 230)
    figure = go.Figure()
    for label, values, dash in (("used", kv_usage, "solid"), ("demanded", kv_pressure, "dot")):
        rows = _thin_where(np.isfinite(values) & np.isfinite(step_ms), _SAMPLE)
        order = rows[np.argsort(-values[rows], kind="stable")]
        weights = step_ms[order]
        if not len(order) or weights.sum() <= 0:
            continue
        above = 100 * np.cumsum(weights) / weights.sum()
        kept = thin(len(order), 300)
        hover = "over %{x:.0f} % for %{y:.0f} % of the time"
        line(figure, 100 * values[order][kept], above[kept], label, colour, hover, dash=dash)
    figure.add_vline(x=100, line={"color": ALARM, "width": 1, "dash": "dash"})
    figure.update_xaxes(title_text="KV blocks (%)", rangemode="tozero")
    figure.update_yaxes(title_text="time above (%)", range=[0, 103])
    return _card(figure)


def phases(
    queue: NDArray[Any], prefill: NDArray[Any], decode: NDArray[Any], colour: str, bounds: Bounds = NO_BOUNDS
) -> go.Figure:
    """Return the mean time that requests spend in each phase, from the fastest tenth to the slowest.

    `bounds` on TTFT (queue and prefill) and E2E (all) are lines.
    """
    total = queue + prefill + decode
    order = np.argsort(total, kind="stable")[: int(np.isfinite(total).sum())]
    if not len(order):
        return empty("no finished requests", 230)
    groups = [group for group in np.array_split(order, min(10, len(order))) if len(group)]
    figure = go.Figure()
    colours = phase_colours(colour)
    unit, scale = ("s", 1000) if total[groups[-1]].mean() >= _SECONDS_FROM_MS else ("ms", 1)
    for name, values in zip(PHASES, (queue, prefill, decode), strict=True):
        tenths, means = list(range(1, len(groups) + 1)), [float(values[group].mean()) / scale for group in groups]
        bars(figure, tenths, means, name, colours[name], f"{name}: %{{y:,.4~r}} {unit}")
    for name in _SINCE_ARRIVAL:
        for ms in bounds.get(name, {}):
            slo_line(figure, ms / scale, f"{metric(name).label} SLO", "y")
    figure.update_layout(barmode="stack", hovermode="x unified", bargap=0.12)
    figure.update_xaxes(title_text="tenth by E2E, slowest last", dtick=1)
    figure.update_yaxes(title_text=f"mean time ({unit})")
    return _card(figure)


def preempted_intervals(steps: pa.Table, request_id: int, replica: int | None) -> list[tuple[int, int]]:
    """Return the intervals in which a request was preempted: from the preempting plan to the start of its next step.

    `steps` needs the columns replica, plan_ns, start_ns, row_ids and preempted_ids; empty where they are null.
    """
    mine = steps.filter(pc.equal(steps["replica"], replica)) if replica is not None else steps
    intervals: list[tuple[int, int]] = []
    begin: int | None = None
    for plan, start, rows, out in zip(
        *(mine[name].to_pylist() for name in ("plan_ns", "start_ns", "row_ids", "preempted_ids")), strict=True
    ):
        if begin is not None and rows and request_id in rows:
            intervals.append((begin, start))
            begin = None
        if begin is None and out and request_id in out:
            begin = plan if plan is not None else start
    return intervals


def _thin_where(mask: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """Return indices of at most `most` of the rows where `mask` holds, evenly spaced."""
    if mask.all():
        return thin(len(mask), most)
    rows = np.flatnonzero(mask)
    return rows[thin(len(rows), most)]


def _card(figure: go.Figure, legend: bool = True) -> go.Figure:
    """Finish a figure that is narrow enough for four side by side."""
    finish(figure, 230, legend)
    return figure.update_layout(legend={"x": 0.0, "xanchor": "left", "font": {"size": 11}, "traceorder": "normal"})
