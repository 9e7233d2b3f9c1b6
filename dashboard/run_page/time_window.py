"""A run over time, and the window to view, which is set by a slider or a box on the plot and kept in the URL."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from tokentwin.calibration.validation.evidence import trust_in_recording
from tokentwin.dashboard.blocks import figure
from tokentwin.dashboard.loading import BY_FILES, open_run
from tokentwin.dashboard.palette import run_colour
from tokentwin.dashboard.run_page import charts as run_charts
from tokentwin.dashboard.run_page.fleet_over_time import FleetOverTime, Series
from tokentwin.dashboard.run_page.step_series import StepSeries
from tokentwin.dashboard.url import interval, set_interval
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

Window = tuple[float, float]

_PARAMETER = "window"
_PANELS = ("waiting", "running", "kv_usage", "batch_tokens", "mfu", "mbu")
_SUMMED = (
    "With several replicas, the panels show their sum. KV use is the used fraction of all blocks of live replicas, and "
    "batch tokens are the mean per step. The grey line counts all requests in the fleet. Some of them are at no "
    "replica, because no replica is live or the request is between two replicas."
)
_HELP = "The plot and the list of requests show only this period. You can also draw a box on the plot."


def time_window(recording: Recording) -> Window | None:
    """Draw the timeline, and return the window in seconds that was chosen on it; None for the whole run."""
    end = round(max((recording.run["duration_ns"] or 0) / 1e9, 0.001), 3)
    above, slider, whole = st.columns([3, 3, 1], vertical_alignment="bottom", gap="medium")
    with slider:
        chosen = interval("Time window (s)", 0.0, end, _PARAMETER, help=_HELP)
    window = None if chosen == (0.0, end) else chosen
    whole.button(
        "Whole run",
        on_click=set_interval,
        args=(0.0, end, _PARAMETER, (0.0, end)),
        disabled=window is None,
        width="stretch",
        key="whole",
    )
    plot = _figure(recording, window)
    key = f"timeline-{recording.path}-{window}"  # a new plot for each window, so that the old box is gone
    figure(
        plot,
        key,
        "Over time",
        trust_in_recording(recording),
        "\n\n".join([*(metric(name).help for name in _PANELS), _SUMMED]),
        place=above,
        on_select=lambda: _brushed(key, end),
        selection_mode="box",
    )
    return window


def _brushed(key: str, end: float) -> None:
    boxes = st.session_state[key].selection.box
    if boxes:
        ends = [round(float(at), 3) for at in boxes[0]["x"]]
        set_interval(0.0, end, _PARAMETER, (min(ends), max(ends)))


@st.cache_resource(max_entries=2, show_spinner=False, hash_funcs=BY_FILES)
def over_time(recording: Recording) -> tuple[StepSeries, FleetOverTime, dict[str, Series]]:
    """Return the data of the timeline. They take most of a long run's time, and do not depend on the window."""
    _, metrics = open_run(recording.path)
    return drawn_over_time(recording, metrics)


def drawn_over_time(recording: Recording, metrics: RunMetrics) -> tuple[StepSeries, FleetOverTime, dict[str, Series]]:
    """Return the steps, the fleet, and MFU and MBU of each step if known, by its start."""
    steps = StepSeries.from_recording(recording)  # meanwhile the head of the page computes the next values
    used = {name: metrics.values(name) for name in ("mfu", "mbu")}
    at_ns = recording.table("steps", ["start_ns"])["start_ns"].to_numpy()
    labelled = {metric(name).label: (at_ns, shares) for name, shares in used.items() if np.isfinite(shares).any()}
    return steps, FleetOverTime.from_run(recording.run, metrics), labelled


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs=BY_FILES)
def _figure(recording: Recording, window: Window | None) -> go.Figure:
    steps, fleet, used = over_time(recording)
    plot = run_charts.timeline(steps, fleet, run_colour(recording.run), window, used=used)
    return plot.update_layout(dragmode="select", selectdirection="h")
