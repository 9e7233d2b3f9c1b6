"""Policy lab: two policies or deployments on identical arrivals, and the differences that can be claimed.

`tokentwin compare` gives the same answers. As on the Plan page, the inputs identify a job, and a link with these inputs
opens the answer again.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import mistake, titled
from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.job_view import offer, start_once
from tokentwin.dashboard.kept_inputs import Incomplete
from tokentwin.dashboard.library import find
from tokentwin.dashboard.planned import TO_COMPARE, Planned, Ways, planned, strip
from tokentwin.dashboard.policy_lab_page import words
from tokentwin.dashboard.policy_lab_page.answer import show_comparison, show_engines
from tokentwin.dashboard.policy_lab_page.inputs import (
    PLANNED,
    b_as_a,
    other_engine_input,
    recording_inputs,
    simulation_inputs,
)
from tokentwin.dashboard.policy_lab_page.tasks import RECORDED, SIMULATED
from tokentwin.dashboard.shown import capitalised, verbatim
from tokentwin.dashboard.url import go_to, in_url, link, named, pick
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.planning.compare.request import CompareRecordingsRequest
from tokentwin.planning.jobs.job import Job
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import defined_in

_RUN = "runs.parquet"
_COMPARE = ("Compare", "compare", "compare_arrows")  # the button
_PIN = "Side A gets the settings of B. Then choose the policy that you want to see beside it."
_KINDS = {"simulate": "Simulate", "recordings": "Recordings"}
_OTHER_TRAFFIC = (
    "The comparison below is not of this plan. To compare policies on it, choose *Simulate* and the traffic *Plan*."
)


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({}), own_policies: bool = False) -> None:
    """Draw the page; jobs, pasted deployments and recordings lie under `runs`.

    If `own_policies` is set, users may upload policies, which are code.
    """
    plan = planned(runs)
    strip(runs, plan, ways, "Policy lab")
    beneath = st.empty()
    with titled("Is B better than A?", (3, 2)):
        what = pick("Compare", list(_KINDS), "compare", show=_KINDS.__getitem__)
    try:
        if what == "recordings":
            _recorded(runs)
        else:
            _simulated(runs, plan, own_policies)
    except UserError as error:
        mistake(error, runs)
    if plan is not None and plan.answer.recommendation and (what == "recordings" or named("offered") != PLANNED):
        beneath.caption(_OTHER_TRAFFIC)


def _simulated(runs: Path, plan: Planned | None, own_policies: bool) -> None:
    request = simulation_inputs(runs, plan, own_policies)
    if isinstance(request, Incomplete):
        st.info(request.what)
        return
    settings = request.as_json()
    job = Job(runs / "jobs", SIMULATED, settings)
    answer = _comparison(job)
    if answer is None:
        if plan is not None and st.session_state.pop(TO_COMPARE, None) == plan.name:
            start_once(job)  # the reader asked for it beside the plan
        offer(job, "There is no answer for these inputs yet. The comparison takes seconds to a minute.", *_COMPARE)
        return
    _answer(answer)
    st.button("Pin B as A", "pin", _PIN, go_to, kwargs=b_as_a(link()), icon=":material/keep:")


def _recorded(runs: Path) -> None:
    recordings = _recordings(runs)
    request = recording_inputs(runs, recordings)
    if len(recordings) < 2:
        _how_to_record(runs)
    settings = request.as_json()
    job = Job(runs / "jobs", RECORDED, settings)
    answer = _comparison(job)
    if answer is None:
        if request.timing is None:  # comparing takes seconds, but simulating the same runs may take longer
            start_once(job)
        offer(job, "These recordings have not been compared yet.", *_COMPARE)
        return
    _answer(answer)
    _on_another_engine(runs, recordings, request, answer)


def _on_another_engine(
    runs: Path, recordings: dict[str, Path], first: CompareRecordingsRequest, answer: ComparisonDocument
) -> None:
    """Show the same change on another engine, beside the first engine and its simulation."""
    also = other_engine_input(recordings, first)
    if also is None:
        return
    job = Job(runs / "jobs", RECORDED, also.as_json())
    other = _comparison(job)
    if other is None:
        start_once(job)
        offer(job, "These recordings have not been compared yet.", *_COMPARE)
        return
    show_engines(blocks, (answer, other))


def _comparison(job: Job) -> ComparisonDocument | None:
    """Return the answer of the job, or the bundled answer to its settings."""
    answer = job.result or bundled_answer(job.settings)
    return None if answer is None else ComparisonDocument.read(answer)


def _how_to_record(runs: Path) -> None:
    with st.expander("This pair is bundled. How to record your own"):
        st.markdown("This command runs both sides on the real engine in turns, three times each, and simulates both:")
        command = "tokentwin compare a.yaml b.yaml --trace TRACE -c CALIBRATION --engine --repeats 3"
        blocks.code(f"{command} --out {runs.resolve().name}/compared")


def _recordings(runs: Path) -> dict[str, Path]:
    """Return recordings by name, the newest first, and directories of several that `compare --engine` leaves."""
    recordings = find(runs, _RUN, named("rec_a"), named("rec_b"))
    groups = {}
    for name, path in recordings.items():
        if "/" in name and re.fullmatch(r"run-\d+", path.name):
            groups[name.rpartition("/")[0]] = path.parent
    single = {name: path for name, path in recordings.items() if name.rpartition("/")[0] not in groups}
    return groups | single


def _answer(answer: ComparisonDocument) -> None:
    icon = _ICONS[answer.winner, answer.difference]
    st.header(f"{icon} {verbatim(capitalised(answer.verdict))}", anchor=False, help=defined_in(answer.verdict))
    with st.container(horizontal=True, vertical_alignment="center"):
        blocks.badge(words.trust(answer))
        downloads(answer, "comparison")
    show_comparison(blocks, answer)


_ICONS = {  # key: the better side, and whether there is any difference
    ("B", True): ":green[:material/check_circle:]",
    ("A", True): ":red[:material/cancel:]",
    ("", True): ":material/balance:",
    ("", False): ":material/drag_handle:",
}
