"""The figure of a diagnosis: what lifting each constraint would buy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dashboard.numbers import shown
from dashboard.palette import ALARM, NEUTRAL, SIMULATED, finish, pale
from serving.metrics import metric

_SLIVER = 0.01  # percent: a bar of no length would have no text
_LEAST = 0.005  # of the p99: less is nothing
_KINDS = {"policy": ("a setting", SIMULATED), "capacity": ("more of a resource", pale(SIMULATED))}


def what_it_buys(counterfactuals: Sequence[Mapping[str, Any]], name: str, before: float | None) -> go.Figure:
    """A bar for each constraint that was lifted: the share of the p99 of `name` that is gone, in percent.

    `counterfactuals` as `Diagnosis.as_dict` has them, those that were skipped left out; `before` is the p99 of the
    simulated run as it was.
    """
    known = [c for c in counterfactuals if c["bought"].get(name) is not None]
    ordered = sorted(known, key=lambda c: c["bought"][name])
    figure = go.Figure()
    for label, colour, of in _traces(ordered, name):
        shares = [100 * c["bought"][name] for c in of]
        figure.add_bar(
            x=[max(share, -100.0) or _SLIVER for share in shares],
            y=[c["name"] for c in of],
            orientation="h",
            name=label,
            marker_color=colour,
            text=[_left(c["p99"].get(name), share) for c, share in zip(of, shares, strict=True)],
            textposition="auto",
            customdata=shares,
            hovertemplate="with %{y}: %{customdata:+.1f} % of the p99 gone<extra></extra>",
        )
    lowest = min((100 * c["bought"][name] for c in ordered), default=0.0)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=[c["name"] for c in ordered])
    was = f", {shown(before)} ms as it was" if before is not None else ""
    figure.update_xaxes(
        title_text=f"share of {metric(name).label} p99 that would be gone (%){was}",
        range=[max(min(1.15 * lowest, -2.0), -100.0), 112.0],
        zeroline=True,
        zerolinecolor=NEUTRAL,
    )
    return finish(figure, 90 + 34 * max(len(ordered), 3))


def _traces(counterfactuals: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """Label, colour and bars: what helps, by the kind of problem it points to, and what does harm."""
    worse = [c for c in counterfactuals if c["bought"][name] < -_LEAST]
    helping = [c for c in counterfactuals if c not in worse]
    traces = [(label, colour, [c for c in helping if c["kind"] == kind]) for kind, (label, colour) in _KINDS.items()]
    return [trace for trace in (*traces, ("makes it worse", ALARM, worse)) if trace[2]]


def _left(p99: float | None, share: float) -> str:
    if abs(share) < 100 * _LEAST:
        return "nothing"
    return f"{-share:+.0f} %" + (f", {shown(p99)} ms left" if p99 is not None and math.isfinite(p99) else "")
