"""The recording of a fleet of a plan: the fleet is simulated once, and then its recording is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.job_view import follow, start
from tokentwin.dashboard.planned import Planned, Ways
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.plan.frontier import Fleet
from tokentwin.serving.errors import UserError

_TO_OPEN = "fleet_to_open"  # key of `st.session_state`: the job whose recording is opened when it is done
_SIMULATE = "Simulate this fleet with the plan's traffic, record every step, and open the recording on the Run page."


def run_of(
    runs: Path,
    plan: Planned,
    fleet: Fleet,
    ways: Ways,
    button: Any,
    label: str = "Simulate it",
    key: str = "simulate",
) -> None:
    """Draw in `button` a link to the fleet's recording, or a button that makes it; the progress is shown below."""
    job = plan.fleet_job(runs, fleet)
    try:
        status = follow(job)
    except UserError as error:
        mistake(error, runs)
        return
    if status.state == "done":
        _open(job, plan, ways, button)
    elif not status.active:
        if st.session_state.get(_TO_OPEN) == job.id:
            del st.session_state[_TO_OPEN]  # the job failed or was cancelled, so it has no recording
        if button.button(label, key=key, help=_SIMULATE, icon=":material/timeline:"):
            st.session_state[_TO_OPEN] = job.id
            start(job)


def _open(job: Job, plan: Planned, ways: Ways, place: Any) -> None:
    """Open the recording if it was just made for this tab; otherwise draw a link to it."""
    if "Run" not in ways:
        return
    run = {"run": f"jobs/{job.id}/run", "plan": plan.name}
    if st.session_state.pop(_TO_OPEN, None) == job.id:
        st.switch_page(ways["Run"], query_params=run)
    place.page_link(ways["Run"], label="Open the run", icon=":material/timeline:", query_params=run)
