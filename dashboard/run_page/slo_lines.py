"""The SLOs of a plan compared with the requests of a run: each latency's distribution, its bound, and a verdict."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from tokentwin.calibration.validation.evidence import trust_in_recording
from tokentwin.dashboard.blocks import figure
from tokentwin.dashboard.cdf_panels import Line, cdf_panels
from tokentwin.dashboard.palette import run_colour
from tokentwin.dashboard.shown import literal
from tokentwin.planning.plan.objectives import Objective, Objectives, parse_objectives
from tokentwin.serving.answers.figures import shown_share, shown_time
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.tables import ecdf

_HEIGHT = 230
_HELP = (
    "A latency meets its SLO if, at the SLO's percentile, its curve is left of the dashed line. The SLOs are those of "
    "this fleet's plan, or those typed above."
)


def slo_lines(recording: Recording, metrics: RunMetrics, slos: tuple[str, ...]) -> None:
    """Draw the figure and the verdicts; nothing without SLOs."""
    if not slos:
        return
    objectives = parse_objectives(slos)
    drawn = slo_figure(metrics, objectives, run_colour(recording.run))
    figure(drawn, "slos", "Against the SLOs", trust_in_recording(recording), _HELP)
    kept = f"{shown_share(objectives.attainment(metrics), 1)} of the requests keep the SLOs"
    st.markdown(literal("; ".join([kept, *_verdicts(metrics, objectives)])) + ".")


def p99_bounds(slos: tuple[str, ...]) -> dict[str, float]:
    """Return the tightest bound in milliseconds of each p99 of all requests, by metric."""
    tightest: dict[str, float] = {}
    for slo in parse_objectives(slos).slos if slos else ():
        if slo.share == Fraction(99, 100) and not slo.attainment and not slo.slo_class:
            ((name, bound),) = slo.bounds
            tightest[name] = min(bound, tightest.get(name, bound))
    return tightest


def slo_figure(metrics: RunMetrics, objectives: Objectives, colour: str) -> go.Figure:
    """Return the distribution of each bounded latency among the finished requests, with its bound on all requests."""
    names = objectives.metrics
    curves: dict[str, Any] = {name: ecdf(metrics.values(name)) for name in names}
    return cdf_panels([Line(curves, "requests", colour)], names, _HEIGHT, objectives.bounds)


def _verdicts(metrics: RunMetrics, objectives: Objectives) -> list[str]:
    """Return a text for each objective: whether it held, and its observed value.

    The main figures are of the finished requests; the percentile among these is stated, too, if it is another.
    """
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
        finished = objective.observed(metrics, math.nan)
        if finished != observed and not math.isnan(finished):
            seen += f", as unfinished requests count; {shown_time(finished, 4)} among finished ones"
        verdicts.append(f"{objective.text} {verdict} ({seen})")
    return verdicts


def _broken(objective: Objective, metrics: RunMetrics) -> bool:
    misses, counted = objective.misses(metrics)
    return misses > objective.allowed(counted)
