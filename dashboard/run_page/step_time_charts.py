"""The figure of a run's step time by part and regime."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from tokentwin.dashboard.palette import NEUTRAL, empty, finish
from tokentwin.dashboard.palette import bars as draw_bars
from tokentwin.serving.answers.figures import shown_share

_MOST = 4  # parts with a colour of their own; the others share one
_TOTAL, _OTHER = "all steps", "other"


def part_times(parts_ns: Mapping[str, Mapping[str, float]], colour: str, run_ns: int | None = None) -> go.Figure:
    """Return a stacked bar of seconds for all steps and for each regime: its longest parts, and all others as one.

    `parts_ns` are nanoseconds by regime and part. If their sum is longer than the run (`run_ns`), the axis says that
    steps overlap: on the stages of a pipeline, or on the replicas of a fleet.
    """
    totals: dict[str, float] = {}
    for parts in parts_ns.values():
        for part, ns in parts.items():
            totals[part] = totals.get(part, 0.0) + ns
    whole = sum(totals.values())
    if not whole:
        return empty("No step took any time", 300)
    ordered = sorted(totals, key=lambda part: -totals[part])
    own = ordered[:_MOST] if len(ordered) > _MOST + 1 else ordered
    bars: dict[str, Mapping[str, float]] = {_TOTAL: totals, **parts_ns}
    rows = list(bars)
    figure = go.Figure()
    for at, part in enumerate(own):
        _add(figure, part, [bars[row].get(part, 0.0) for row in rows], bars, _shade(colour, at, len(own)))
    rest = [part for part in ordered if part not in own]
    if rest:
        about = ", ".join(f"{part} {shown_share(totals[part] / whole, 1)}" for part in rest)
        _add(figure, _OTHER, [sum(bars[row].get(p, 0.0) for p in rest) for row in rows], bars, NEUTRAL, about)
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1])
    overlap = ", which overlap" if run_ns and whole > run_ns else ""
    figure.update_xaxes(title_text=f"time of steps{overlap} (s)", rangemode="tozero")
    return finish(figure, 380)


def _add(
    figure: go.Figure,
    name: str,
    values: list[float],
    bars: Mapping[str, Mapping[str, float]],
    shade: str,
    about: str = "",
) -> None:
    shares = [ns / max(sum(parts.values()), 1e-9) for ns, parts in zip(values, bars.values(), strict=True)]
    note = f"<br>over all steps: {about}" if about else ""
    text = [shown_share(share) if share >= 0.08 else "" for share in shares]
    inside = {"text": text, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    hover = f"{name}: %{{x:,.4~r}} s, %{{customdata:.1f}} % of %{{y}}{note}<extra></extra>"
    percents = [100 * share for share in shares]
    seconds = [ns / 1e9 for ns in values]
    draw_bars(figure, seconds, list(bars), name, shade, hover, orientation="h", customdata=percents, **inside)


def _shade(colour: str, at: int, count: int) -> str:
    """Return shade number `at` of `count`, from darker than `colour` to paler; all are visible on a dark page."""
    towards = 0.35 - at / max(count - 1, 1)  # black, then white
    end, share = (0, towards) if towards > 0 else (255, -towards)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (end - part) * share):02x}" for part in parts)
