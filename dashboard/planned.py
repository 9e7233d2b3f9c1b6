"""A plan on the pages to which it leads: a strip at the top of the page, and the first values of the page's inputs.

A plan is identified by the name of its job, a hash of its settings, which is in the address of each of these pages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.dashboard.plan_page.inputs import plan_request
from tokentwin.dashboard.plan_page.tasks import COARSE, FLEET, PLAN
from tokentwin.dashboard.plan_page.words import EXAMPLE, LOOKED_AT, fleet_name, model_name, traffic_name
from tokentwin.dashboard.shown import literal, verbatim
from tokentwin.dashboard.url import keep, named
from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.planning.jobs.job import Job, started
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.frontier import Fleet
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.errors import UserError

Ways = Mapping[str, StreamlitPage]  # the pages of the dashboard by title; empty if a page is drawn alone
_NAME = re.compile(r"[0-9a-f]{16}")
_LINK = "link.json"  # in a plan's job: the parameters of the Plan page that are its inputs
FLEETS = "fleets"  # of the parameter `show` of the Plan page
_RUN_OF_A_FLEET = re.compile(r"jobs/([0-9a-f]{16})/run")
TO_COMPARE = "planned_to_compare"  # key of `st.session_state`: the plan whose policies are to be compared at once


class Planned(NamedTuple):
    """A plan with an answer: the name of its job, its settings, and the answer.

    If it is not `complete`, the fleet is final, and curves around it are still to come.
    """

    name: str
    settings: Mapping[str, Any]
    answer: PlanDocument
    complete: bool = True

    @property
    def model(self) -> str:
        """The model's name in the catalogue; for a pasted model its architecture and size."""
        best = self.answer.recommendation
        return model_name(str(self.settings.get("model") or (best and best.deployment["model"]) or ""))

    @property
    def traffic(self) -> str:
        """The name of the trace, or the kind of the requests and their rate."""
        return traffic_name(self.settings["traffic"], self.answer)

    @property
    def bounds(self) -> dict[str, float]:
        """The loosest bound of each metric among the SLOs of all requests, in milliseconds."""
        return dict(parse_objectives(self.settings["slos"]).bounds)

    def fleet_job(self, runs: Path, point: Fleet) -> Job:
        """Return the job that records one of the plan's fleets."""
        settings = {"plan": self.settings, "engine": point.engine, "replicas": point.replicas}
        return Job(runs / "jobs", FLEET, settings)


@cache
def _bundled() -> Planned:
    settings = plan_request().as_json()
    return Planned(EXAMPLE, settings, PlanDocument.read(bundled_answer(settings)))


def _kept(runs: Path, name: str) -> Planned | None:
    """Return the plan of this name without reading the others; None if it is absent or damaged."""
    request = read_json(runs / "jobs" / name / "request.json") if _NAME.fullmatch(name) else None
    settings = request.get("settings") if isinstance(request, dict) else None
    job = Job(runs / "jobs", PLAN, settings) if isinstance(settings, dict) else None
    return None if job is None or job.id != name else plan_of(job)


def plan_of(job: Job) -> Planned | None:
    """Return the plan of a job, as far as it was simulated; None before its fleet is final, or if it is damaged."""
    whole, early = job.result, job.document(COARSE)
    answer = early.get("answer") if whole is None and isinstance(early, dict) else whole
    with suppress(UserError):
        return None if answer is None else Planned(job.id, job.settings, PlanDocument.read(answer), whole is not None)
    return None


def keep_link(job: Job, parameters: Mapping[str, Sequence[str]]) -> None:
    """Keep the parameters of the Plan page with the plan's job, so that other pages can lead back to it."""
    if job.directory.is_dir() and not (job.directory / _LINK).exists():
        with suppress(OSError):  # a directory that cannot be written has no way back
            write_json(job.directory / _LINK, {name: list(values) for name, values in parameters.items()})


def inputs_of(runs: Path, name: str) -> dict[str, list[str]] | None:
    """Return the parameters of the Plan page that are the inputs of this plan; None if they are not known."""
    if name == EXAMPLE:
        return {}
    kept = read_json(runs / "jobs" / name / _LINK) if _NAME.fullmatch(name) else None
    if not isinstance(kept, dict):
        return None
    return {str(key): list(map(str, values)) for key, values in kept.items() if isinstance(values, list)}


def link_to(runs: Path, name: str, show: str = "") -> dict[str, str] | None:
    """Return the parameters with which the Plan page shows this plan, in the view `show`; None if not known."""
    if inputs_of(runs, name) is None:
        return None
    return {"plan": name} | ({"show": show} if show else {})


def plan_named(runs: Path, name: str) -> Planned | None:
    """Return the plan of this name, computed here or bundled; None if it is absent or damaged."""
    return _bundled() if name == EXAMPLE else _kept(runs, name)


def planned(runs: Path) -> Planned | None:
    """Return the plan that the link names or that this tab viewed last, and keep it in the link; None without one."""
    said = named("plan")
    name = said or st.session_state.get(LOOKED_AT)
    if name is None:
        return None
    plan = plan_named(runs, name)
    if plan is None:
        if said:
            st.info(
                f"The plan {verbatim(said[:40])} of this link is not on this server. "
                "Open the link of the Plan page instead, which contains the plan's inputs."
            )
        return None
    keep("plan", name)
    return plan


def planned_or_bundled(runs: Path) -> Planned | None:
    """Return the plan as `planned` does, or the bundled one if the link names none; None if the named one is absent."""
    return planned(runs) or (None if named("plan") else _bundled())


def plan_settings(runs: Path, recording: str) -> Mapping[str, Any] | None:
    """Return the settings of the plan that has the recorded fleet; None if the recording is of no plan."""
    job = _RUN_OF_A_FLEET.fullmatch(recording)
    request = read_json(runs / "jobs" / job[1] / "request.json") if job else None
    settings = request.get("settings") if isinstance(request, dict) else None
    plan = settings.get("plan") if isinstance(settings, dict) else None
    return plan if isinstance(plan, dict) else None


def plan_with(runs: Path, settings: Mapping[str, Any]) -> Planned | None:
    """Return the plan with these settings, computed here or bundled; None if there is no answer."""
    bundled = _bundled()
    return bundled if settings == bundled.settings else _kept(runs, Job(runs / "jobs", PLAN, settings).id)


def alike(runs: Path, settings: Mapping[str, Any], but: Collection[str]) -> Planned | None:
    """Return the newest plan, or the bundled one, whose settings are the same except those in `but`; None if none is.

    Plans without an answer that can be read are left out.
    """

    def kept(all_settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in all_settings.items() if name not in but}

    for job in started(runs / "jobs", PLAN):
        if kept(job.settings) == kept(settings) and (plan := plan_of(job)) is not None:
            return plan
    bundled = _bundled()
    return bundled if kept(bundled.settings) == kept(settings) else None


def strip(runs: Path, plan: Planned | None, ways: Ways, here: str) -> None:
    """Draw one line: what was planned, and links to the pages that it leads to from the page `here`."""
    best = plan and plan.answer.recommendation
    if plan is None or best is None:
        return
    said = (fleet_name(best, plan.answer.spares), plan.model, plan.traffic, ", ".join(plan.answer.objectives))
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        whose = "The bundled example" if plan.name == EXAMPLE else "Planned"
        st.markdown(f"{whose}: **{literal(said[0])}** · {' · '.join(map(literal, said[1:]))}", width="content")
        go_on(runs, plan, ways, here)


def _back(runs: Path, plan: Planned, ways: Ways) -> None:
    """Draw links to the plan and to all of its fleets."""
    for label, icon, view in (("Back to the plan", "dns", ""), ("All its fleets", "scatter_plot", FLEETS)):
        if (inputs := link_to(runs, plan.name, view)) is not None:
            st.page_link(ways["Plan"], label=label, icon=f":material/{icon}:", query_params=inputs)


def go_on(runs: Path, plan: Planned, ways: Ways, here: str) -> None:
    """Draw the links from the page `here` to the other pages of a plan, side by side in the present container."""
    best, query = plan.answer.recommendation, {"plan": plan.name}
    if best is None:
        return
    if here != "Plan" and "Plan" in ways:
        _back(runs, plan, ways)
    lab = ways.get("Policy lab") if here != "Policy lab" else None
    if lab and st.button("Compare policies on this plan", icon=":material/compare_arrows:", type="tertiary"):
        st.session_state[TO_COMPARE] = plan.name
        st.switch_page(lab, query_params={**query, "offered": "plan"})
    if here != "Trust" and "Trust" in ways:
        st.page_link(ways["Trust"], label="Can you trust it?", icon=":material/balance:", query_params=query)
    job = plan.fleet_job(runs, best)
    if here not in ("Run", "Plan") and "Run" in ways and job.status.state == "done":
        run = {**query, "run": f"jobs/{job.id}/run"}
        st.page_link(ways["Run"], label="Run of this fleet", icon=":material/timeline:", query_params=run)
