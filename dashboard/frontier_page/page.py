"""Frontier: every fleet that a plan simulated. A click on one that is recorded opens it on the Run page.

One that is not can be simulated in full, and is opened once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import streamlit as st

from calibration.provenance import Provenance
from dashboard.blocks import badge, figure, table, titled
from dashboard.downloads import downloads
from dashboard.fleet_run import open_when_there, run_of
from dashboard.frontier_page import charts as frontier_charts
from dashboard.plan_page.words import (
    FORMATS,
    LOOKED_AT,
    carriers,
    fleet_rows,
    plan_name,
    provenance,
    provenance_of,
)
from dashboard.planned import Planned, Ways, plans, strip
from dashboard.shown import literal
from dashboard.url import choose, go_to, in_url, keep, named
from planning.plan.frontier import Point


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """The page, over the plans under `runs` and the bundled one."""
    found = _in_order(plans(runs))
    top = st.container()
    with titled("Every fleet of a plan", (1, 1)):
        name = choose("Plan", list(found), "plan", show=lambda name: plan_name(*found[name][1:]), lasting=False)
    planned = found[name]
    with top:
        strip(runs, planned, ways, "Frontier")
    answer, points = planned.answer, planned.answer.points
    best = answer.recommendation
    st.caption(
        f"{len(points)} fleets, each simulated with the same {answer.requests:,} requests. SLOs: "
        f"{literal(', '.join(answer.objectives))}. Click a fleet to choose it."
    )
    downloads(answer, "plan")
    if not points:
        st.info("This plan has no fleet to show: no candidate can serve the traffic.")
        return
    recommended = answer.place(best) if best else None
    rated = provenance_of(points, "fleets")
    badge(rated)
    left, right = st.columns(2, gap="medium")
    with left:
        plot = frontier_charts.frontier(points, recommended)
        _clickable(plot, "frontier", "Speed per user and per GPU", rated, planned, runs)
    with right:
        plot = frontier_charts.price(points, recommended)
        _clickable(plot, "price", "What speed costs", rated, planned, runs)
    _fleet(runs, planned, points[_chosen(points, recommended)], ways)
    table(fleet_rows(answer, recommended), {**FORMATS, "attainment (%)": "%.1f"}, height="content")


def _in_order(found: dict[str, Planned]) -> dict[str, Planned]:
    """The one last looked at first; plans without any fleet come last."""
    seen = st.session_state.get(LOOKED_AT)
    order = sorted(found, key=lambda name: (not found[name].answer.points, name != seen))
    return {name: found[name] for name in order}


def _clickable(plot: Any, key: str, text: str, rated: Provenance, planned: Planned, runs: Path) -> None:
    def clicked() -> None:
        marks = [mark for mark in st.session_state[key].selection.points if "customdata" in mark]
        if marks:
            point = planned.answer.points[int(marks[0]["customdata"][0])]
            go_to(fleet=_name(point))
            open_when_there(planned.fleet_job(runs, point))

    figure(plot, key, text, rated, _HELP, on_select=clicked, selection_mode="points")


def _chosen(points: Sequence[Point], recommended: int | None) -> int:
    """What was clicked or the link names, or what is recommended; kept in the link."""
    otherwise = recommended if recommended is not None else 0
    known = {_name(point): at for at, point in enumerate(points)}
    at = known.get(named("fleet") or "", otherwise)
    keep("fleet", _name(points[at]), _name(points[otherwise]))
    return at


def _fleet(runs: Path, planned: Planned, point: Point, ways: Ways) -> None:
    """One point: what it is, and the way to a recording of it."""
    rated = provenance(point)
    with st.container(border=True):
        text, button = st.columns([4, 1], vertical_alignment="center")
        verdict = ":blue-badge[meets the SLOs]" if point.met else ":gray-badge[breaks the SLOs]"
        with text.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"**{literal(carriers(point, planned.answer.spares))}** {verdict}", width="content")
        price = "" if point.usd_per_mtok_out is None else f", \\${point.usd_per_mtok_out:,.2f} per Mtok of output"
        text.caption(
            f"{point.gpus} GPUs, \\${point.usd_per_hour:,.2f}/h{price}; "
            f"{100 * point.attainment:.1f} % of the requests meet the SLOs; "
            f"{point.tok_s_user:,.3g} tokens/s per user, {point.tok_s_gpu:,.4g} per GPU; step times {rated.mark}: "
            f"{literal(rated.reason)}"
        )
        run_of(runs, planned, point, ways, button)
        if candidate := planned.answer.candidates.get(point.engine):
            with st.expander("Its deployment"):
                st.json(candidate.deployment, expanded=1)


def _name(point: Point) -> str:
    return f"{point.replicas} x {point.engine}"


_HELP = (
    "Each point is a fleet. Further right, the median user gets more output tokens per second. Grey fleets break an "
    "SLO. Hollow points are extrapolated. The dotted line joins the fleets that meet the SLOs and that no other such "
    "fleet beats on both axes. Click a fleet to choose it; if its run is recorded, the Run page opens."
)
