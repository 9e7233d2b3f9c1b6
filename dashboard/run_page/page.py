"""Run: one recorded run over time, its single requests, and the reasons why it is slow.

The head, the timeline and the lifecycles are always shown. Of the views below the timeline, only the chosen one is
drawn. The page opens on bundled recordings if there are no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.bundled import DEMO, bundled_recordings
from tokentwin.dashboard.library import RECORDING, calibrations, find
from tokentwin.dashboard.loading import open_run, prefetch
from tokentwin.dashboard.planned import Planned, Ways, plan_settings, plan_with, planned, strip
from tokentwin.dashboard.run_page.diagnosis_view import diagnosis_view
from tokentwin.dashboard.run_page.header import header, headline
from tokentwin.dashboard.run_page.lifecycles import lifecycle_figures, lifecycles
from tokentwin.dashboard.run_page.pinned_run import pinned_run
from tokentwin.dashboard.run_page.request_table import request_table
from tokentwin.dashboard.run_page.slo_lines import p99_bounds, slo_lines
from tokentwin.dashboard.run_page.step_time import step_time
from tokentwin.dashboard.run_page.time_window import Window, over_time, time_window
from tokentwin.dashboard.run_page.words import disturbance, show_metrics, show_origin
from tokentwin.dashboard.slos import Bounds, asked_slos, bounds_of
from tokentwin.dashboard.url import choose, in_url, named, part_in_url, pick
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

_LONG = 250_000  # number of steps up to which the page is complete in a moment
_VIEWS = {"requests": "Requests", "steps": "Where step time goes", "diagnosis": "Diagnosis", "metrics": "Every metric"}


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the recordings under `runs`, or over the bundled ones if there are none.

    A recorded fleet of a plan is judged by the SLOs of its own plan, other recordings by those that the reader types.
    """
    top, plan = st.container(), planned(runs)
    own = find(runs, RECORDING, named("run"), named("pin"))
    recordings = own or bundled_recordings()
    title, chooser = st.columns([2, 1], vertical_alignment="bottom")
    with chooser:
        name = choose("Recording", _in_order(runs, recordings, plan), "run", lasting=False)
    settings = plan_settings(runs, name)
    with top:
        strip(runs, plan_with(runs, settings) if settings else None, ways, "Run")
    try:
        recording, metrics = open_run(recordings[name])
        with title:
            header(recording, metrics, name, runs)
        if not own:
            _bundled(runs)
        slos = tuple(settings["slos"]) if settings else asked_slos()
        if sum(recording.group_rows("steps")) > _LONG:
            prefetch(partial(over_time, recording), partial(lifecycle_figures, recording, dict(bounds_of(slos))))
        _head(recording, metrics, slos)
        pinned_run(recording, metrics, name, recordings)
        _body(recording, metrics, runs, slos)
    except UserError as error:
        mistake(error, runs)


def _in_order(runs: Path, recordings: Iterable[str], plan: Planned | None) -> list[str]:
    """Return the names of the recordings, the fleet that the plan recommends first."""
    best = plan.answer.recommendation if plan else None
    first = f"jobs/{plan.fleet_job(runs, best).id}/run" if plan and best else ""
    return sorted(recordings, key=lambda name: name != first)


def _head(recording: Recording, metrics: RunMetrics, slos: tuple[str, ...]) -> None:
    """Draw warnings, the main figures, and how they meet the SLOs."""
    run = recording.run
    if run["status"] == "interrupted":
        blocks.warning("This run was interrupted. The page shows the part before the interruption.")
    if disturbed := disturbance(recording):
        blocks.warning(disturbed)
    headline(recording, metrics)
    slo_lines(recording, metrics, slos)


def _body(recording: Recording, metrics: RunMetrics, runs: Path, slos: tuple[str, ...]) -> None:
    with st.container():
        window = time_window(recording)
    bounds = dict(bounds_of(slos))
    _view(recording, metrics, runs, window, bounds, p99_bounds(slos))
    lifecycles(recording, metrics, bounds)
    with st.expander("How this was run"):
        show_origin(blocks, recording.run)


@st.fragment
@part_in_url
def _view(
    recording: Recording,
    metrics: RunMetrics,
    runs: Path,
    window: Window | None,
    bounds: Bounds,
    p99_ms: dict[str, float],
) -> None:
    """Draw the chosen view, without the rest of the page."""
    view = pick("View", list(_VIEWS), "view", show=_VIEWS.__getitem__)
    try:
        if view == "requests":
            request_table(recording, metrics, window, bounds)
        elif view == "steps":
            step_time(recording, list(_calibrations(runs).values()))
        elif view == "diagnosis":
            diagnosis_view(recording, metrics.finished.size, runs, _calibrations(runs), p99_ms)
        else:
            show_metrics(blocks, recording.run, metrics)
    except UserError as error:
        mistake(error, runs)


def _calibrations(runs: Path) -> dict[str, Path]:
    return {**calibrations(runs), "bundled": DEMO / "calibration"}


def _bundled(runs: Path) -> None:
    st.info(
        f"There is no recording in `{runs.resolve().name}` yet. This recording is **bundled**; you can choose another "
        "one above.",
        icon=":material/inventory_2:",
    )
    with st.expander("Make your own recording"):
        # Text, because Streamlit's highlighter of code is nearly as large as Plotly, and would delay the first figure.
        st.markdown(
            "A recording is a directory that the real engine or the simulator writes. `tokentwin demo` makes several. "
            "`tokentwin bench --help` explains how to run your own trace on the real engine, and "
            "`tokentwin simulate --help` explains how to simulate a trace."
        )
