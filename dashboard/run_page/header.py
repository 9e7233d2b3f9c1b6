"""The head of the Run page: the run, the trust in it, whether it kept up with the load, and its main figures."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.calibration.validation.evidence import trust_in_recording
from tokentwin.dashboard.blocks import badge, facts
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.palette import CLOCK_NAME
from tokentwin.dashboard.run_page.words import backlog, bands_of, capacity_of, headline_figures
from tokentwin.dashboard.shown import capitalised, literal, sentence
from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.planning.run_report import RequestEndings
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording, notes_of

_SATURATION = {"STABLE": "green", "BACKLOGGED": "orange", "OVERLOADED": "red"}
_CLOCK_COLOUR = {"real": "orange", "simulated": "blue"}
_OF_A_FLEET = re.compile(r"jobs/[0-9a-f]+/run")
_CELL_PX = 138  # width: all fit side by side on a wide page, five on a narrow one
_BAND = "The grey numbers are 90 % bands from the uncertainty of step times."


def header(recording: Recording, metrics: RunMetrics, name: str, runs: Path) -> None:
    """Draw the title, the outcome, whether the run kept up, and the downloads."""
    run = recording.run
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    badges = f":{_CLOCK_COLOUR.get(clock, 'gray')}-badge[{clock}]"
    outcome = RequestEndings.from_metrics(metrics)
    short = outcome.shortfall
    if short:
        badges += f" :red-badge[{short}]"
    verdict = metrics.saturation.verdict if metrics.saturation is not None else None
    capacity = capacity_of(run)
    if capacity and capacity.is_within_error:
        badges += " :orange-badge[stable or not is within the error]"
    elif verdict and not (short and verdict == "STABLE"):  # a fleet that sheds requests has no backlog
        badges += f" :{_SATURATION[verdict]}-badge[{verdict.lower()}]"
    title = title_of(name, recording)
    st.title(literal(title), anchor=False)
    what = literal(served(recording))
    workload = f"{literal(run['workload'])} · " if run["workload"] else ""
    engines = f"{run['replicas']} replicas" if (run["replicas"] or 1) > 1 else "1 replica"
    facts = f"{badges} **{what}** · {workload}{outcome.text} · {engines} · {(run['duration_ns'] or 0) / 1e9:,.1f} s"
    st.markdown(facts, help=_backlog(metrics))
    if run["status"] == "complete":
        downloads(RecordedRun(recording, title, runs), name)


def title_of(name: str, recording: Recording) -> str:
    """Return the recording's name, or a fleet's short description if its recording is named by a hash."""
    gpu = notes_of(recording.run).get("gpu")
    if not _OF_A_FLEET.fullmatch(name) or not isinstance(gpu, str):
        return name
    return f"{recording.run['replicas']} x TP{recorded_deployment(recording).tensor_parallel_size} {gpu}"


def served(recording: Recording) -> str:
    """Return the model and the device of the run; `an unknown model` if the recording has no readable deployment."""
    try:
        deployment = recorded_deployment(recording)
    except (UserError, ValueError):
        return "an unknown model"
    gpu = notes_of(recording.run).get("gpu")
    return f"{deployment.model} on {gpu if isinstance(gpu, str) else deployment.device.upper()}"


def headline(recording: Recording, metrics: RunMetrics) -> None:
    """Draw the main figures of the run, their badge, and their bands if the recording has them."""
    run = recording.run
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        badge(trust_in_recording(recording))
        if bands_of(run):
            st.caption(_BAND, width="content")
        outcome = RequestEndings.from_metrics(metrics)
        if outcome.shortfall:
            st.caption(sentence(outcome.latencies_of), width="content")
    if capacity := capacity_of(run):
        st.warning(sentence(capacity.sentence))
    facts(headline_figures(run, metrics), _CELL_PX)


def _backlog(metrics: RunMetrics) -> str | None:
    saturation = metrics.saturation
    if saturation is None:
        return None
    waiting = f"requests wait during {shown_share(saturation.waiting_share)} of the time"
    return f"{capitalised(backlog(saturation))}; {waiting}.\n\n{metric('saturation').help}"
