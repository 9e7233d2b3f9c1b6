"""Frontier: the engines of a plan, and every fleet that the plan simulated, as a view of the Plan page.

The page itself serves old links, and leads to the Plan page.

A fleet with a recording opens on the Run page. Another fleet can be simulated in full, and then opens there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import choosing
from tokentwin.dashboard.fleet_run import run_of
from tokentwin.dashboard.frontier_page.answer import show_engines
from tokentwin.dashboard.plan_page.words import (
    attainment_of,
    every_fleet,
    ranked,
    slos_of,
    trust,
)
from tokentwin.dashboard.planned import FLEETS, Planned, Ways
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.url import keep, named
from tokentwin.planning.plan.frontier import Point
from tokentwin.serving.answers.figures import shown_number, shown_usd


def show(ways: Ways) -> None:
    """Lead to the Plan page, with the plan and the fleet of the link."""
    st.switch_page(ways["Plan"], query_params={**st.query_params, "show": FLEETS})


def show_fleets(runs: Path, planned: Planned, ways: Ways) -> None:
    """Draw the engines of a plan and all of its fleets, of which one can be chosen, and simulated.

    The recommended fleet has no button here, because the Plan page has it.
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
    _fleet(runs, planned, points[at], ways, "" if at == recommended else "simulate_fleet")
    order = ranked(points, recommended)
    ids = [_name(points[at]) for at in order]
    chosen = choosing("fleet", ids, "fleets")
    blocks.table(every_fleet(answer, recommended), **chosen)


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
        verdict = f":{'blue' if point.met else 'gray'}-badge[SLOs {slos_of(planned.answer, point)}]"
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
