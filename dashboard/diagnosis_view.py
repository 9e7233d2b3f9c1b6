"""Why a run is as slow as it is: its symptoms at once, what lifting each constraint would buy by a job.

Both are those of `tokentwin diagnose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from calibration.baseline import FINISHED, LATENCIES
from calibration.decision_replay import recorded_deployment
from calibration.standing import Standing, noted
from calibration.step_marks import shown_share
from dashboard.badge import BARE, figure
from dashboard.diagnosis_charts import what_it_buys
from dashboard.example_run import example_diagnosis
from dashboard.job_view import follow, start
from dashboard.library import stamp
from dashboard.prose import literal, sentence
from dashboard.shown import shown
from dashboard.url import choose
from serving.metrics import metric
from tokentwin.diagnosing import DIAGNOSIS, diagnosed, diagnosis_document
from tokentwin.jobs.job import Job
from tokentwin.repricing import Source, fitting_sources, source_of
from traces.recording import Recording

_MANY = 100_000  # requests: beyond, symptoms take seconds and come with the job
_WORST = "worst"
_BUYS = "The run simulated again, each time without one constraint."
_WORKLOAD = "workload.parquet"


def diagnosis_view(recording: Recording, requests: int, runs: Path, calibrations: Mapping[str, Path]) -> None:
    """Symptoms, and the counterfactuals with their verdict once they were asked for."""
    at = str(recording.path.resolve())
    first = _symptoms(at, stamp(recording.path)) if requests <= _MANY else None
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    with right:
        judged = choose("Explain the p99 of", (_WORST, *LATENCIES), "judged", show=_label)
    source = _source(recording, calibrations)
    job = None
    if isinstance(source, Source):
        job = Job(runs / "jobs", DIAGNOSIS, _settings(recording, at, source, judged))
    answer = (job.result or example_diagnosis(job.settings)) if job else None
    found = answer or first
    with left:
        _verdict(found)
    if found is not None:
        _symptom_table(found)
    if not isinstance(source, Source):
        st.caption(source)
    elif job is not None and not (found and found["counterfactuals"]):
        _ask(job)
    elif found is not None:
        _counterfactuals(found)


def _label(name: str) -> str:
    return "what is worst" if name == _WORST else metric(name).label


def _verdict(found: Mapping[str, Any] | None) -> None:
    if found is None:
        st.markdown("A run of so many requests is diagnosed in the background.")
    elif found["counterfactuals"]:
        st.markdown(f"**{sentence(found['verdict'])}**")
    elif found["symptoms"]:
        worst = found["symptoms"][0]
        st.markdown(f"The worst symptom: **{worst['name']}** ({worst['lifecycle']}).")
    else:
        st.markdown("No symptom found.")


def _symptom_table(found: Mapping[str, Any]) -> None:
    if found["symptoms"]:
        st.table(
            pd.DataFrame(
                {
                    "symptom": [s["name"] for s in found["symptoms"]],
                    "lifecycle": [s["lifecycle"] for s in found["symptoms"]],
                    "evidence": [s["evidence"] for s in found["symptoms"]],
                    "what would prove it": [s["proof"] for s in found["symptoms"]],
                }
            ).set_index("symptom")
        )
    if not found["steps"]:
        st.caption("The recording holds no steps, so that compute and memory were not looked at.")


def _ask(job: Job) -> None:
    status = follow(job)
    if status.active:
        return
    st.markdown("What lifting one constraint at a time would buy is found by simulating the run again without each.")
    if st.button("Find what would help", type="primary", key="diagnose", icon=":material/search:"):
        start(job)


def _counterfactuals(found: Mapping[str, Any]) -> None:
    tried = [c for c in found["counterfactuals"] if not c["skipped"]]
    name = found["metric"]
    sheds = name == FINISHED
    bars = what_it_buys(tried, name, found["simulated_finished"] if sheds else found["simulated_p99"].get(name))
    standing = noted(found.get("standing"), "the diagnosis does not say how far its step times can be trusted")
    error = found["twin_error"]
    if error is not None:
        of = "share of lost requests" if sheds else "p99"
        standing = Standing(
            standing.mark, f"{standing.reason}; the simulated {of} is {100 * error:+.1f} % off the recorded"
        )
    figure(bars, "buys", "What would help", standing, _BUYS, menu=BARE)
    if found.get("warning"):
        st.warning(literal(sentence(found["warning"])), icon=":material/warning:")
    with st.expander("All latencies, and what was not tried"):
        _table(found, tried)
        for c in found["counterfactuals"]:
            if c["skipped"]:
                st.caption(f"{c['name']}: not tried, {c['skipped']}")


def _table(found: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> None:
    columns = {
        "with": ["the run as it was", *(c["name"] for c in tried)],
        "problem of": ["", *(c["kind"] for c in tried)],
    }
    sheds = found["metric"] == FINISHED
    if sheds:
        shares = (found["simulated_finished"], *(c["finished"] for c in tried))
        columns["requests that finish"] = [shown_share(share) for share in shares]
    for name, before in found["simulated_p99"].items():
        changed = (f"{_ms(c['p99'].get(name), sheds)} ({_change(c['bought'].get(name))})" for c in tried)
        columns[f"{metric(name).label} p99{' of those' if sheds else ''} (ms)"] = [shown(before), *changed]
    st.dataframe(columns, hide_index=True, height="content")


def _ms(value: float | None, sheds: bool) -> str:
    """No number: of requests that finish there is none, of all requests it is beyond all numbers."""
    return shown(value) if value is not None or sheds else "never"


def _change(share: float | None) -> str:
    return "–" if share is None else f"{round(-100 * share):+d} %"


def _settings(recording: Recording, at: str, source: Source, judged: str) -> dict[str, Any]:
    return {
        "run": at,
        "stamp": stamp(recording.path),
        "calibration": source.calibration and str(Path(source.calibration).resolve()),
        "gpu": source.gpu,
        "router": "",
        "judged": None if judged == _WORST else judged,
        "slo": "",
    }


def _source(recording: Recording, calibrations: Mapping[str, Path]) -> Source | str:
    """What times the run's steps again, or in a line why nothing does."""
    run = recording.run
    if run["status"] != "complete":
        return "An interrupted run cannot be simulated again: evidence only."
    if not (recording.path / _WORKLOAD).is_file():
        return "The recording does not hold what was offered, and cannot be simulated again: evidence only."
    if run["clock"] == "virtual":
        return source_of(run, calibrations.values()) or (
            "The calibration that timed it is not among the bundled ones and does not lie under the directory of runs: "
            "evidence only."
        )
    fitting = fitting_sources(recorded_deployment(recording), calibrations.values())
    if not fitting:
        return "No calibration of this engine lies under the directory of runs (`tokentwin calibrate`): evidence only."
    names = {str(path): name for name, path in calibrations.items()}
    chosen = choose("Calibration", [names[str(source.calibration)] for source in fitting], "calibration")
    return Source(str(calibrations[chosen]), None)


@st.cache_data(max_entries=16, show_spinner="Looking for symptoms")
def _symptoms(directory: str, stamp: int) -> dict[str, Any]:
    return diagnosis_document(*diagnosed(directory))
