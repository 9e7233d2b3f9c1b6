"""Frontier: the engines of a plan, and every fleet that the plan simulated, as a view of the Plan page.

The page itself serves old links: it leads to the Plan page, or draws a plan whose inputs are not known.

A fleet with a recording opens on the Run page. Another fleet can be simulated in full, and then opens there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from tokentwin.calibration.trust import weakest
from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import choosing, titled
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.fleet_run import run_of
from tokentwin.dashboard.frontier_page.answer import show_engines
from tokentwin.dashboard.plan_page.words import (
    LOOKED_AT,
    attainment_of,
    every_fleet,
    plan_name,
    ranked,
    slos_of,
    trust,
)
from tokentwin.dashboard.planned import FLEETS, Planned, Ways, link_to, plans, strip
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.trust_page.results import readable_external, trust_on
from tokentwin.dashboard.url import choose, in_url, keep, named
from tokentwin.planning.plan.frontier import Point
from tokentwin.serving.answers.figures import shown_number, shown_usd


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the plans under `runs` and the bundled plan.

    A plan whose inputs are known is shown on the Plan page instead, where old links lead.
    """
    by_name = _in_order(plans(runs))
    if "Plan" in ways and (inputs := link_to(runs, named("plan") or next(iter(by_name)), FLEETS)) is not None:
        fleet = named("fleet")
        st.switch_page(ways["Plan"], query_params=inputs | ({"fleet": fleet} if fleet else {}))
    top = st.container()
    with titled("All fleets of a plan", (1, 1)):
        name = choose("Plan", list(by_name), "plan", show=lambda name: plan_name(*by_name[name][1:]), lasting=False)
        keep("plan", name)  # always, because the first plan of another server or tab is another plan
    planned = by_name[name]
    with top:
        strip(runs, planned, ways, "Frontier")
    downloads(planned.answer, "plan")
    if points := planned.answer.points:
        published = readable_external(runs)
        blocks.badge(
            weakest((trust_on(published, planned.answer.gpu_of(point), trust(point)) for point in points), "fleets")
        )
    show_fleets(runs, planned, ways)


def show_fleets(runs: Path, planned: Planned, ways: Ways, on_plan: bool = False) -> None:
    """Draw the engines of a plan and all of its fleets, of which one can be chosen.

    On the Plan page, which has the button that simulates the recommended fleet, it is drawn for other fleets only.
    """
    answer, points = planned.answer, planned.answer.points
    best = answer.recommendation
    st.caption(
        f"{len(points)} fleets, each simulated with the same {answer.requests:,} requests. SLOs: "
        f"{literal(', '.join(answer.objectives))}. Choose a fleet in the table."
    )
    if not points:
        st.info("This plan has no fleet to show, because no candidate can serve the traffic.")
        return
    recommended = answer.place(best) if best else None
    show_engines(blocks, answer)
    at = _chosen(points, recommended)
    key = "simulate_fleet" if on_plan else "simulate"
    _fleet(runs, planned, points[at], ways, "" if on_plan and at == recommended else key)
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


def _fleet(runs: Path, planned: Planned, point: Point, ways: Ways, key: str) -> None:
    """Draw one fleet: its figures, and with a `key` the button that leads to its recording."""
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
            f"step times {rated.level}: {literal(blocks.plain(rated.reason))}"
        )
        if key:
            run_of(runs, planned, point, ways, button, key=key)
        if candidate := planned.answer.candidates.get(point.engine):
            with st.expander("Deployment of one replica"):
                st.json(candidate.deployment, expanded=1)


def _name(point: Point) -> str:
    return f"{point.replicas} x {point.engine}"
