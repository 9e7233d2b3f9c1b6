"""The Trust page on what was measured: the calibrated domain, and the steps of one run marked on it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboard.badge import badge
from dashboard.bundled import SAMPLES
from dashboard.domain import Domain, Known, calibration_behind, domain
from dashboard.domain_charts import domain_maps
from dashboard.library import stamp
from dashboard.palette import CLOCK, CLOCK_NAME, NEUTRAL
from dashboard.url import choose
from serving.errors import UserError
from traces.recording import Recording

_BAR = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}


def show_domain(runs: Path, recordings: dict[str, Path], first: Path | None, calibration: str) -> None:
    """The maps behind one of `recordings`, that in `first` unasked; a real run is held against `calibration`."""
    heading, chooser = st.columns([3, 2], vertical_alignment="bottom")
    with heading:
        st.subheader(
            "What was measured, and where this run goes",
            anchor=False,
            help="Orange was measured. In grey, times are extrapolated: nothing alike was. A cross is a step of the run "
            "that lies outside, be it in a dimension that is not drawn.",
        )
    if not recordings:
        st.caption("No recording to mark.")
        return
    names = sorted(recordings, key=lambda name: first is None or recordings[name].resolve() != first.resolve())
    with chooser:
        name = choose("Run in question", names, "scenario")
    try:
        recording = Recording(recordings[name])
        behind = recording.run["calibration"] or calibration
        known = calibration_behind((runs, SAMPLES), behind) if behind else None
        if known is None:
            where = f"calibration `{behind}`, which is not under `{runs}`" if behind else "no calibration"
            st.caption(f"The steps of *{name}* were timed by {where}; its domain cannot be drawn.")
            return
        found = _domain(str(recordings[name]), stamp(recordings[name]), behind, known)
    except UserError as error:
        st.error(str(error), icon=":material/error:")
        return
    _in_words(found, name)
    clock = recording.run["clock"]
    label = f"{CLOCK_NAME.get(clock, 'recorded')} step"
    st.plotly_chart(domain_maps(found, label, CLOCK.get(clock, NEUTRAL)), key="domain", config=_BAR)
    st.caption(f"Behind it: {found.about}.")


def _in_words(found: Domain, name: str) -> None:
    told = f"**{100 * found.share:.1f} %** of the {found.steps:,} steps of *{name}* lie outside"
    if found.share:
        told += f", {100 * found.time_share:.1f} % of their time; what puts them there is {found.reason}"
        reason = f"{100 * found.share:.1f} % of the steps lie outside what was measured: {found.reason}"
    else:
        told, reason = f"**All {found.steps:,}** steps of *{name}* lie inside", "nothing beyond what was measured"
    badge(found.mark, reason)
    st.markdown(f"{told}.")


@st.cache_resource(max_entries=16, show_spinner="Holding the run against what was measured")
def _domain(recording: str, stamp: int, calibration: str, _known: Known) -> Domain:
    return domain(Recording.load(recording), _known)
