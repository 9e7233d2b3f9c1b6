"""Frontier: every fleet that a plan simulated. A click on one that is recorded opens it on the Run page.

One that is not can be simulated in full, and is opened once it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from calibration.provenance import Provenance
from dashboard.blocks import badge, figure, mistake, table, titled
from dashboard.bundled import bundled_answer
from dashboard.downloads import downloads
from dashboard.examples import plan_request
from dashboard.frontier_page import charts as frontier_charts
from dashboard.job_view import follow, start
from dashboard.plan_page.tasks import FLEET, PLAN
from dashboard.plan_page.words import (
    EXAMPLE,
    FORMATS,
    LOOKED_AT,
    carriers,
    fleet_rows,
    plan_name,
    provenance,
    provenance_of,
)
from dashboard.shown import literal
from dashboard.url import choose, go_to, in_url, keep, named
from planning.jobs.job import Job, finished
from planning.plan.document import PlanDocument
from planning.plan.frontier import Point
from serving.errors import UserError

_TO_OPEN = "frontier_to_open"  # the job whose recording is opened when it is there


class _Planned(NamedTuple):
    settings: Mapping[str, Any]
    answer: PlanDocument


@in_url
def show(runs: Path, run_page: StreamlitPage | None = None) -> None:
    """The page, over the plans under `runs` and the bundled one; `run_page` is where a recording is opened."""
    plans = _plans(runs)
    with titled("Every fleet of a plan", (1, 1)):
        name = choose("Plan", list(plans), "plan", show=lambda name: plan_name(*plans[name]), lasting=False)
    planned = plans[name]
    answer, points = planned.answer, planned.answer.points
    best = answer.recommendation
    st.caption(
        f"{len(points)} fleets, each simulated with the same {answer.requests:,} requests. SLOs: "
        f"{literal(', '.join(answer.objectives))}. Click a fleet to choose it."
    )
    if not points:
        st.info("This plan has no fleet to show: no candidate can serve the traffic.")
        return
    recommended = answer.place(best) if best else None
    left, right = st.columns(2, gap="medium")
    rated = provenance_of(points, "fleets")
    with left:
        plot = frontier_charts.frontier(points, recommended)
        _clickable(plot, "frontier", "Speed per user and per GPU", rated, planned, runs)
    with right:
        plot = frontier_charts.price(points, recommended)
        _clickable(plot, "price", "What speed costs", rated, planned, runs)
    _fleet(runs, planned, points[_chosen(points, recommended)], run_page)
    table(fleet_rows(answer, recommended), {**FORMATS, "attainment (%)": "%.1f"}, height="content")
    downloads(answer, "plan")


def _plans(runs: Path) -> dict[str, _Planned]:
    """The answered plans by the name of their job: the one last looked at, then the newest, then the bundled one.

    Plans without any fleet come last. Of a damaged one a line says so.
    """
    found: dict[str, _Planned] = {}
    for job in finished(runs / "jobs", PLAN):
        try:
            found[job.id] = _Planned(job.settings, PlanDocument.read(job.result))
        except UserError:
            mistake(UserError("plan", f"jobs/{job.id}/result.json", "is damaged; delete it and plan again"))
    settings = plan_request().as_json()
    found[EXAMPLE] = _Planned(settings, PlanDocument.read(bundled_answer(settings)))
    seen = st.session_state.get(LOOKED_AT)
    order = sorted(found, key=lambda name: (not found[name].answer.points, name != seen))
    return {name: found[name] for name in order}


def _clickable(plot: Any, key: str, text: str, rated: Provenance, planned: _Planned, runs: Path) -> None:
    def clicked() -> None:
        marks = [mark for mark in st.session_state[key].selection.points if "customdata" in mark]
        if marks:
            point = planned.answer.points[int(marks[0]["customdata"][0])]
            go_to(fleet=_name(point))
            st.session_state[_TO_OPEN] = _job(runs, planned, point).id

    figure(plot, key, text, rated, _HELP, on_select=clicked, selection_mode="points")


def _chosen(points: Sequence[Point], recommended: int | None) -> int:
    """What was clicked or the link names, or what is recommended; kept in the link."""
    otherwise = recommended if recommended is not None else 0
    known = {_name(point): at for at, point in enumerate(points)}
    at = known.get(named("fleet") or "", otherwise)
    keep("fleet", _name(points[at]), _name(points[otherwise]))
    return at


def _job(runs: Path, planned: _Planned, point: Point) -> Job:
    """What records the fleet."""
    settings = {"plan": planned.settings, "engine": point.engine, "replicas": point.replicas}
    return Job(runs / "jobs", FLEET, settings)


def _fleet(runs: Path, planned: _Planned, point: Point, run_page: StreamlitPage | None) -> None:
    """One point: what it is, and the way to a recording of it."""
    with st.container(border=True):
        text, button = st.columns([4, 1], vertical_alignment="center")
        verdict = ":blue-badge[meets the SLOs]" if point.met else ":gray-badge[breaks the SLOs]"
        with text.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"**{literal(carriers(point, planned.answer.spares))}** {verdict}", width="content")
            badge(provenance(point))
        price = "" if point.usd_per_mtok_out is None else f", \\${point.usd_per_mtok_out:,.2f} per Mtok of output"
        text.caption(
            f"{point.gpus} GPUs, \\${point.usd_per_hour:,.2f}/h{price}; "
            f"{100 * point.attainment:.1f} % of the requests meet the SLOs; "
            f"{point.tok_s_user:,.3g} tokens/s per user, {point.tok_s_gpu:,.4g} per GPU"
        )
        job = _job(runs, planned, point)
        try:
            status = follow(job)
        except UserError as error:
            mistake(error, runs)
            return
        if status.state == "done":
            _open(job, run_page, button)
        elif not status.active:
            if st.session_state.get(_TO_OPEN) == job.id:
                del st.session_state[_TO_OPEN]  # it was clicked, or its simulation was cancelled: it is not there
            if button.button("Simulate it", key="simulate", help=_SIMULATE, width="stretch"):
                st.session_state[_TO_OPEN] = job.id
                start(job)
        if candidate := planned.answer.candidates.get(point.engine):
            with st.expander("Its deployment"):
                st.json(candidate.deployment, expanded=1)


def _open(job: Job, run_page: StreamlitPage | None, place: Any) -> None:
    """Go to the recording at once, if it was clicked or waited for; else show the way."""
    if run_page is None:
        return
    run = {"run": f"jobs/{job.id}/run"}
    if st.session_state.pop(_TO_OPEN, None) == job.id:
        st.switch_page(run_page, query_params=run)
    place.page_link(run_page, label="Open the run", icon=":material/timeline:", query_params=run)


def _name(point: Point) -> str:
    return f"{point.replicas} x {point.engine}"


_HELP = (
    "Each point is a fleet. Further right, the median user gets more output tokens per second. Grey fleets break an "
    "SLO. Hollow points are extrapolated. The dotted line joins the fleets that meet the SLOs and that no other such "
    "fleet beats on both axes. Click a fleet to choose it; if its run is recorded, the Run page opens."
)
_SIMULATE = "Simulates this fleet again with the plan's traffic, records every step, and opens the run on the Run page."
