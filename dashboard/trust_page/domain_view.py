"""The Trust page's view of measured steps: the calibrated domain, and marks for the steps of one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.loading import BY_FILES
from tokentwin.dashboard.sheet import Sheet
from tokentwin.dashboard.trust_page.domain import Domain, domain, timed_by
from tokentwin.dashboard.trust_page.domain_charts import domain_maps
from tokentwin.dashboard.url import choose, forget, moved
from tokentwin.planning.repricing import Source
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.errors import UserError
from tokentwin.traces.recording import Recording

TITLE = "Measured steps, and the steps of this run"
_HELP = (
    "Steps in orange cells were measured. In grey cells step times are extrapolated, because no similar step was "
    "measured. A cross is a step of the run outside the measured range, perhaps in a dimension that is not drawn."
)


def show_domain(runs: Path, recordings: dict[str, Path], report: str, first: Path | None, calibration: str) -> None:
    """Draw the maps behind one of `recordings`.

    For the report of this name the run `first` is the default. `calibration` times a real run if it fits its engine.
    """
    above, chooser = st.columns([3, 2], vertical_alignment="bottom")
    if not recordings:
        above.header(TITLE, anchor=False)
        st.caption("There is no recording to show.")
        return
    names = sorted(recordings, key=lambda name: first is None or recordings[name].resolve() != first.resolve())
    with chooser:
        _forget_another_reports(report)
        name = choose("Run", names, "scenario", lasting=False)
    try:
        recording = Recording.load(recordings[name])
        source = timed_by(recording, runs, calibration)
        if source is None:
            above.header(TITLE, anchor=False)
            st.caption(_unknown(recording, name))
            return
        domain = _domain(recordings[name], source, Path(source.calibration) if source.calibration else None)
    except UserError as error:
        above.header(TITLE, anchor=False)
        mistake(error, runs)
        return
    show_maps(blocks, domain, recording.run, name, place=above)


def show_maps(to: Sheet, domain: Domain, run: Mapping[str, Any], name: str, **where: Any) -> None:
    """Show the maps of a run called `name`; `run` is its row of `runs`."""
    if domain.beyond.steps:
        to.text(
            f"**{shown_share(domain.beyond.steps, 1)}** of the {domain.counted_steps} of {name} lie outside the "
            f"measured range. They take {shown_share(domain.beyond.time, 1)} of the time. "
            f"The most frequent reason is {domain.reason}."
        )
    else:
        to.text(f"**All {domain.counted_steps}** of {name} lie inside the measured range.")
    to.figure(domain_maps(domain, run), "domain", TITLE, domain.trust, _HELP, **where)
    to.text(f"Step times come from {domain.about}.", soft=True)


def _forget_another_reports(report: str) -> None:
    """Forget the run that was chosen for another report, unless a link names one."""
    if st.session_state.get("scenario_of", report) != report and not moved("scenario"):
        forget("scenario")
    st.session_state["scenario_of"] = report


def _unknown(recording: Recording, name: str) -> str:
    if recording.run["clock"] == "virtual":
        behind = recording.run["calibration"] or "without an id"
        return f"There is no map, because the calibration ({behind}) with the step times of *{name}* was not found."
    return f"There is no map, because there is no calibration of the engine that ran *{name}*."


@st.cache_resource(max_entries=16, show_spinner="Comparing the run with the measured steps", hash_funcs=BY_FILES)
def _domain(recording: Path, source: Source, calibration: Path | None) -> Domain:
    return domain(Recording.load(recording), source)
