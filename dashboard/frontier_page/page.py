"""Frontier: the engines of a plan, and every fleet that the plan simulated.

A fleet with a recording opens on the Run page. Another fleet can be simulated in full, and then opens there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from dashboard import blocks
from dashboard.blocks import choosing, titled
from dashboard.downloads import downloads
from dashboard.fleet_run import run_of
from dashboard.frontier_page.answer import show_engines
from dashboard.plan_page.words import (
    LOOKED_AT,
    attainment_of,
    every_fleet,
    plan_name,
    ranked,
    slos_of,
    trust,
    trust_in,
)
from dashboard.planned import Planned, Ways, plans, strip
from dashboard.shown import literal
from dashboard.url import choose, in_url, keep, named
from planning.plan.frontier import Point
from serving.answers.figures import shown_number, shown_usd


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the plans under `runs` and the bundled plan."""
    by_name = _in_order(plans(runs))
    top = st.container()
    with titled("All fleets of a plan", (1, 1)):
        name = choose("Plan", list(by_name), "plan", show=lambda name: plan_name(*by_name[name][1:]), lasting=False)
        keep("plan", name)  # always, because the first plan of another server or tab is another plan
    planned = by_name[name]
    with top:
        strip(runs, planned, ways, "Frontier")
    answer, points = planned.answer, planned.answer.points
    best = answer.recommendation
    st.caption(
        f"{len(points)} fleets, each simulated with the same {answer.requests:,} requests. SLOs: "
        f"{literal(', '.join(answer.objectives))}. Choose a fleet in the table."
    )
    downloads(answer, "plan")
    if not points:
        st.info("This plan has no fleet to show, because no candidate can serve the traffic.")
        return
    recommended = answer.place(best) if best else None
    blocks.badge(trust_in(points, "fleets"))
    show_engines(blocks, answer)
    _fleet(runs, planned, points[_chosen(points, recommended)], ways)
    order = ranked(points, recommended)
    ids = [_name(points[at]) for at in order]
    chosen = choosing("fleet", ids, "fleets")
    blocks.table(every_fleet(answer, recommended), **chosen)


def _in_order(by_name: dict[str, Planned]) -> dict[str, Planned]:
    """Return the plans with the last viewed one first, and plans without a fleet last."""
    seen = st.session_state.get(LOOKED_AT)
    order = sorted(by_name, key=lambda name: (not by_name[name].answer.points, name != seen))
    return {name: by_name[name] for name in order}


def _chosen(points: Sequence[Point], recommended: int | None) -> int:
    """Return the fleet that was clicked or that the link names, else the recommended one; the link keeps it."""
    otherwise = recommended if recommended is not None else 0
    known = {_name(point): at for at, point in enumerate(points)}
    at = known.get(named("fleet") or "", otherwise)
    keep("fleet", _name(points[at]), _name(points[otherwise]))
    return at


def _fleet(runs: Path, planned: Planned, point: Point, ways: Ways) -> None:
    """Draw one fleet: its figures, and the way to its recording."""
    rated = trust(point)
    with st.container(border=True):
        text, button = st.columns([4, 1], vertical_alignment="center")
        verdict = f":{'blue' if point.met else 'gray'}-badge[SLOs {slos_of(point)}]"
        with text.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(f"**{literal(point.called(planned.answer.spares))}** {verdict}", width="content")
        price = "" if point.usd_per_mtok_out is None else f", \\{shown_usd(point.usd_per_mtok_out)} per Mtok output"
        text.caption(
            f"{point.gpus} GPUs, \\{shown_usd(point.usd_per_hour)}/h{price}; "
            f"{literal(attainment_of(planned.answer, point))} of the requests meet the SLOs; "
            f"{shown_number(point.tok_s_user)} tokens/s per user, {shown_number(point.tok_s_gpu)} per GPU; "
            f"step times {rated.level}: {literal(rated.reason)}"
        )
        run_of(runs, planned, point, ways, button)
        if candidate := planned.answer.candidates.get(point.engine):
            with st.expander("Deployment of one replica"):
                st.json(candidate.deployment, expanded=1)


def _name(point: Point) -> str:
    return f"{point.replicas} x {point.engine}"
