"""The answer to other prices, spares or another risk, at once: the same fleets, ranked anew without a simulation."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from tokentwin.dashboard.plan_page.words import fleet_name
from tokentwin.dashboard.planned import alike
from tokentwin.dashboard.shown import literal
from tokentwin.planning.plan.document import percent
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.what_if import NOT_SIMULATED, what_if
from tokentwin.serving.answers.figures import shown_usd
from tokentwin.serving.deployments.config import parse


def what_if_line(runs: Path, request: PlanRequest) -> bool:
    """Draw the answer to `request` and return True if it follows from a plan with other prices, spares or risk."""
    plan = alike(runs, request.as_json(), NOT_SIMULATED)
    best = plan.answer.recommendation if plan else None
    if plan is None or best is None:
        return False
    repriced = what_if(plan.answer, parse(PlanRequest, dict(plan.settings), where="plan"), request)
    if repriced is None:
        return False
    fleet, before = fleet_name(repriced.fleet, request.spares), fleet_name(best, plan.answer.spares)
    st.header(f"{literal(fleet)}, \\{shown_usd(repriced.fleet.usd_per_hour)}/h", anchor=False)
    unknown = "The probability that the SLOs hold is unknown. "
    holds = unknown if repriced.holds is None else f"The SLOs hold in {percent(repriced.holds)} of cases. "
    same = fleet == before
    was = "The fleet stays the same" if same else f"Before, it was {literal(before)}"
    doubt = f" This may not be the cheapest: {literal(repriced.doubt)}." if repriced.doubt else ""
    st.markdown(f"{holds}{was}, at \\{shown_usd(best.usd_per_hour)}/h.{doubt}")
    st.caption("Nothing was simulated again: this follows from the fleets of the plan before.")
    return True
