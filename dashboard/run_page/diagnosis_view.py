"""The reasons why a run is slow: symptoms, which are shown at once, and the gains from lifts, which a job computes.

`tokentwin diagnose` also gives both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.dashboard import blocks
from tokentwin.dashboard.bundled import SAMPLES, bundled_answer
from tokentwin.dashboard.job_view import offer
from tokentwin.dashboard.library import stamp
from tokentwin.dashboard.loading import BY_FILES
from tokentwin.dashboard.run_page.diagnosis_charts import what_it_buys
from tokentwin.dashboard.run_page.words import trust
from tokentwin.dashboard.sheet import Sheet, show
from tokentwin.dashboard.shown import sentence
from tokentwin.dashboard.url import choose
from tokentwin.planning.diagnose.baseline import LATENCIES
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.diagnose.recorded_run import DIAGNOSIS, diagnose
from tokentwin.planning.diagnose.request import DiagnoseRequest
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.repricing import Source, fitting_sources, source_of
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.metrics import metric
from tokentwin.traces.recording import Recording

_MANY = 100_000  # number of requests above which the job finds the symptoms, because this takes seconds
_WORST = "worst"
_JUDGED = {_WORST: "the worst latency", **{name: metric(name).label for name in LATENCIES}}
_ONLY = "The page shows the symptoms only."
_BUYS = (
    "The run is simulated again, each time without one constraint. A bar shows the fraction of the p99 that "
    "disappears, compared with a simulation with all constraints. An asterisk marks ideal changes that cannot be made."
)
_ASK = "The run is simulated again, each time without one constraint, to find out which change would help."
_WORKLOAD = "workload.parquet"


def diagnosis_view(
    recording: Recording, requests: int, runs: Path, calibrations: Mapping[str, Path], bounds: Mapping[str, float]
) -> None:
    """Draw the symptoms, and the counterfactuals with their verdict once the reader has asked for them.

    `bounds` are the bounds of p99s in milliseconds, if the run has SLOs.
    """
    at = str(recording.path.resolve())
    first = _symptoms(recording) if requests <= _MANY else None
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    with right:
        judged = choose("Explain the p99 of", list(_JUDGED), "judged", show=_JUDGED.__getitem__)
    source = _source(recording, calibrations)
    job = None
    if isinstance(source, Source):
        job = Job(runs / "jobs", DIAGNOSIS, _settings(recording, at, source, judged))
    answer = (job.result or bundled_answer(job.settings)) if job else None
    diagnosis = DiagnosisDocument.read(answer) if answer else first
    with left:
        _verdict(diagnosis, bounds)
    if diagnosis is not None:
        show(blocks, diagnosis.shown_symptoms())
    if not isinstance(source, Source):
        st.caption(source)
    elif job is not None and not (diagnosis and diagnosis.counterfactuals):
        offer(job, _ASK, "Find what would help", "diagnose")
    elif diagnosis is not None:
        command = diagnosis.command(diagnosis.best, at) if diagnosis.best else ""
        for where in (runs.resolve().parent, SAMPLES.parents[1]):  # pages do not show where files lie on the server
            command = command.replace(f"{where}/", "")
        show_changes(blocks, diagnosis, command)


def _verdict(diagnosis: DiagnosisDocument | None, bounds: Mapping[str, float]) -> None:
    if diagnosis is None:
        st.markdown("This run has so many requests that a background job looks for symptoms.")
    else:
        st.markdown(f"**{sentence(diagnosis.finding(bounds))}**")


def show_changes(to: Sheet, diagnosis: DiagnosisDocument, command: str = "") -> None:
    """Show the gain from lifting each constraint; `command` compares the run with the best change."""
    if command:
        to.text("This command compares the run with the recommended change, request by request:")
        to.code(command)
    to.figure(what_it_buys(diagnosis), "buys", "What would help", trust(diagnosis), _BUYS)
    if diagnosis.warning:
        to.warning(sentence(diagnosis.warning))
    with to.fold("All latencies, and changes that were not tried"):
        show(to, diagnosis.shown_lifts())
        show(to, diagnosis.shown_areas())


def _settings(recording: Recording, at: str, source: Source, judged: str) -> dict[str, Any]:
    inputs = {
        "run": at,
        "stamp": stamp(recording.path),
        "calibration": source.calibration and str(Path(source.calibration).resolve()),
        "gpu": source.gpu,
        "metric": None if judged == _WORST else judged,
    }
    return parse(DiagnoseRequest, inputs, where="diagnosis").as_json()


def _source(recording: Recording, calibrations: Mapping[str, Path]) -> Source | str:
    """Return the source that can time the run's steps again, or one line that says why there is none."""
    run = recording.run
    if run["status"] != "complete":
        return f"An interrupted run cannot be simulated again. {_ONLY}"
    if not (recording.path / _WORKLOAD).is_file():
        return f"The recording has no workload, so it cannot be simulated again. {_ONLY}"
    if run["clock"] == "virtual":
        return source_of(run, calibrations.values()) or (
            f"The calibration of this run is neither bundled nor in the runs directory. {_ONLY}"
        )
    fitting = fitting_sources(recorded_deployment(recording), calibrations.values())
    if not fitting:
        return f"The runs directory has no calibration of this engine; `tokentwin calibrate` makes one. {_ONLY}"
    names = {str(path): name for name, path in calibrations.items()}
    chosen = choose("Calibration", [names[str(source.calibration)] for source in fitting], "calibration")
    return Source(str(calibrations[chosen]), None)


@st.cache_resource(max_entries=16, show_spinner="Looking for symptoms", hash_funcs=BY_FILES)
def _symptoms(recording: Recording) -> DiagnosisDocument:
    return diagnose(DiagnoseRequest(run=str(recording.path.resolve())))
