"""The SLOs of a plan compared with the requests of a run: each latency's distribution, its bound, and a verdict."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from calibration.trust import trust_in_run
from dashboard.blocks import BARE, figure
from dashboard.cdf_panels import Line, axis_ms, cdf_panels
from dashboard.palette import ALARM, run_colour
from dashboard.shown import literal
from planning.plan.objectives import Objective, Objectives, parse_objectives
from traces.metrics.run_metrics import RunMetrics
from traces.recording import Recording
from traces.tables import ecdf

_HEIGHT = 230
_HELP = (
    "A latency meets its SLO if, at the SLO's percentile, its curve is left of the dashed line. The SLOs come from the "
    "plan above."
)


def slo_lines(recording: Recording, metrics: RunMetrics, slos: tuple[str, ...]) -> None:
    """Draw the figure and the verdicts; nothing without SLOs."""
    if not slos:
        return
    objectives = parse_objectives(slos)
    drawn = slo_figure(metrics, objectives, run_colour(recording.run))
    figure(drawn, "slos", "Against the SLOs", trust_in_run(recording.run), _HELP, menu=BARE)
    st.markdown(literal("; ".join(_verdicts(metrics, objectives))) + ".")


def slo_figure(metrics: RunMetrics, objectives: Objectives, colour: str) -> go.Figure:
    """Return the distribution of each bounded latency among the finished requests, with its bound."""
    names = [name for name, _ in objectives.bounds]
    curves: dict[str, Any] = {name: ecdf(metrics.values(name)) for name in names}
    plot = cdf_panels([Line(curves, "requests", colour)], names, _HEIGHT)
    panels = [name for name in names if len(curves[name][0])]
    for name, bound in objectives.bounds:
        if name in panels:
            at, bound = panels.index(name) + 1, bound / axis_ms([curves[name]])
            end = max(plot.get_subplot(1, at).xaxis.range[1], 1.05 * bound)
            plot.update_xaxes(range=[0, end], row=1, col=at)
            plot.add_vline(x=bound, line={"color": ALARM, "dash": "dash", "width": 1.5}, row=1, col=at)
    return plot


def _verdicts(metrics: RunMetrics, objectives: Objectives) -> list[str]:
    """Return a text for each objective: whether it held, and its observed value."""
    verdicts = []
    for objective in objectives.slos:
        observed = objective.observed(metrics)
        if math.isnan(observed):
            verdict = "cannot be checked"
        elif _broken(objective, metrics):
            verdict = "is broken"
        else:
            verdict = "holds"
        seen = objectives.seen(objective, observed, objectives.broken(metrics))
        verdicts.append(f"{objective.text} {verdict} ({seen})")
    return verdicts


def _broken(objective: Objective, metrics: RunMetrics) -> bool:
    misses, counted = objective.misses(metrics)
    return misses > objective.allowed(counted)
