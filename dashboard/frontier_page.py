"""Frontier: every fleet that a plan simulated. One of them can be recorded in full and opened on the Run page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from dashboard import frontier_charts
from dashboard.badge import badge, figure
from dashboard.downloads import downloads
from dashboard.example import example
from dashboard.job_view import follow, start
from dashboard.plan_tasks import FLEET, PLAN
from dashboard.prose import literal, prose
from dashboard.standing import Standing, noted, together
from dashboard.url import choose, keep, named
from serving.errors import UserError
from tokentwin.exports.plan import PlanAnswer
from tokentwin.jobs.job import Job, finished

_EXAMPLE = "example"
_FRONTIERS = ("frontier", "frontier_by_price")


class _Asked(NamedTuple):
    settings: Mapping[str, Any]
    answer: Mapping[str, Any]


def show(runs: Path, run_page: StreamlitPage | None = None) -> None:
    """The page, over the plans under `runs` and the bundled one; `run_page` is where a recording is opened."""
    plans = _plans(runs)
    title, chooser = st.columns([2, 1], vertical_alignment="bottom")
    title.title("What can be bought", anchor=False)
    with chooser:
        name = choose("Plan", list(plans), "plan", show=lambda name: _headline(plans[name]))
    asked = plans[name]
    answer, points = asked.answer, asked.answer["points"]
    best = answer["recommendation"]
    st.caption(
        f"{len(points)} fleets simulated on the same {answer['requests']:,} requests; "
        f"{literal(', '.join(answer['objectives']))}. Click one for what it is."
    )
    if not points:
        st.info("This plan simulated no fleet to its end: no candidate can serve at all.")
        return
    recommended = frontier_charts.place(points, best) if best else None
    frontier, cheapest = ([frontier_charts.place(points, point) for point in answer[name]] for name in _FRONTIERS)
    left, right = st.columns(2, gap="medium")
    standing = together(map(_standing, points), "fleets")
    with left:
        plot = frontier_charts.frontier(points, frontier, recommended)
        clicked = _clicked(plot, "frontier", "Fast for users, or for GPUs", standing)
    with right:
        plot = frontier_charts.price(points, cheapest, recommended)
        clicked = _clicked(plot, "price", "What speed costs", standing, clicked)
    at = _chosen(points, clicked, recommended)
    _fleet(runs, asked, points[at], run_page)
    st.dataframe(_rows(points, {*frontier, *cheapest}), hide_index=True, column_config=_COLUMNS)
    downloads(PlanAnswer(answer), "plan")


def _plans(runs: Path) -> dict[str, _Asked]:
    """The answered plans by the name of their job, the newest first; last the bundled one."""
    found = {job.id: _Asked(job.settings, job.result) for job in finished(runs / "jobs", PLAN)}
    return {**found, _EXAMPLE: _Asked(example()["settings"], example()["answer"])}


def _headline(asked: _Asked) -> str:
    best = asked.answer["recommendation"]
    model = Path(asked.settings["model"]).name
    fleet = prose(_name(best)) if best else "no fleet"
    return f"{model}, {asked.settings['traffic'].get('name', 'trace')}: {fleet}"


def _standing(point: Mapping[str, Any]) -> Standing:
    return noted(point, "this plan was made before its fleets said how far their step times can be trusted")


def _clicked(plot: Any, key: str, text: str, standing: Standing, otherwise: int | None = None) -> int | None:
    """The point that was clicked in the figure."""
    event = figure(plot, key, text, standing, _HELP, on_select="rerun", selection_mode="points")
    marks = [mark for mark in event.selection.points if "customdata" in mark]
    return int(marks[0]["customdata"][0]) if marks else otherwise


def _chosen(points: Sequence[Mapping[str, Any]], clicked: int | None, recommended: int | None) -> int:
    """What was clicked, what the link names, or what is recommended; kept in the link."""
    if clicked is None:
        said = named("fleet") or ""
        known = {_name(point): at for at, point in enumerate(points)}
        clicked = known.get(said, recommended if recommended is not None else 0)
    keep("fleet", _name(points[clicked]))
    return clicked


def _fleet(runs: Path, asked: _Asked, point: Mapping[str, Any], run_page: StreamlitPage | None) -> None:
    """One point: what it is, and the way to a recording of it."""
    with st.container(border=True):
        text, button = st.columns([4, 1], vertical_alignment="center")
        verdict = ":blue-badge[meets the SLOs]" if point["met"] else ":gray-badge[breaks the SLOs]"
        with text.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"**{literal(_name(point))}** {verdict}", width="content")
            badge(_standing(point))
        price = "" if point["usd_per_mtok_out"] is None else f", \\${point['usd_per_mtok_out']:,.2f} per Mtok of output"
        text.caption(
            f"{point['gpus']} GPUs, \\${point['usd_per_hour']:,.2f}/h{price}; "
            f"{100 * point['attainment']:.1f} % attained; "
            f"{point['tok_s_user']:,.3g} tokens/s for a user, {point['tok_s_gpu']:,.4g} from a GPU"
        )
        candidate = asked.answer["candidates"][point["engine"]]
        job = Job(runs / "jobs", FLEET, {"plan": asked.settings, **candidate, "replicas": point["replicas"]})
        try:
            status = follow(job)
        except UserError as error:
            st.error(str(error), icon=":material/error:")
            return
        if status.state == "done":
            name = f"jobs/{job.id}/run"
            if run_page is not None:
                button.page_link(run_page, label="Open the run", icon=":material/timeline:", query_params={"run": name})
        elif not status.active and button.button("Simulate it", key="simulate", help=_SIMULATE, width="stretch"):
            start(job)
        with st.expander("Its deployment"):
            st.json(candidate["deployment"], expanded=1)


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['replicas']} x {point['engine']}"


def _rows(points: Sequence[Mapping[str, Any]], frontier: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "fleet": prose(_name(point)),
            "standing": _standing(point).mark,
            "GPUs": point["gpus"],
            "$/h": point["usd_per_hour"],
            "tok/s per user": point["tok_s_user"],
            "tok/s per GPU": point["tok_s_gpu"],
            "$/Mtok output": point["usd_per_mtok_out"],
            "attainment (%)": 100 * point["attainment"],
            "SLOs": "met" if point["met"] else "broken",
            "on a frontier": at in frontier,
        }
        for at, point in enumerate(points)
    ]


_HELP = (
    "The median user's output tokens per second against those of a GPU. More replicas move a fleet right and down. "
    "Grey fleets break an SLO, hollow ones are extrapolated; the dotted line joins those that no other beats on both "
    "axes."
)
_SIMULATE = "Simulates this fleet on the plan's traffic once more and keeps every step, to be opened on the Run page."
_COLUMNS = {
    name: st.column_config.NumberColumn(format=form)
    for name, form in {
        "$/h": "$%.2f",
        "tok/s per user": "%.0f",
        "tok/s per GPU": "%.0f",
        "$/Mtok output": "$%.2f",
        "attainment (%)": "%.1f",
    }.items()
}
