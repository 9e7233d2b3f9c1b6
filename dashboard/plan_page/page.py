"""Plan: the cheapest fleet that meets its SLOs on given traffic, as a sentence with its evidence.

The inputs identify a job. A link with these inputs opens the answer again for every user. The page itself computes
nothing that takes long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from tokentwin.calibration.trust import least_certain
from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.bundled import bundled_answer
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.fleet_run import run_of
from tokentwin.dashboard.frontier_page.page import show_fleets
from tokentwin.dashboard.job_view import follow, offer, start
from tokentwin.dashboard.kept_inputs import Incomplete
from tokentwin.dashboard.library import stamp
from tokentwin.dashboard.plan_page import charts as plan_charts
from tokentwin.dashboard.plan_page import words
from tokentwin.dashboard.plan_page.answer import figures, show_others, show_recommended, show_traffic, show_winning_mix
from tokentwin.dashboard.plan_page.beside import pinned_plan
from tokentwin.dashboard.plan_page.estimates import estimates, estimates_table
from tokentwin.dashboard.plan_page.inputs import plan_inputs
from tokentwin.dashboard.plan_page.tasks import COARSE, MOST_CLIENTS, PLAN, glance
from tokentwin.dashboard.plan_page.what_if_line import what_if_line
from tokentwin.dashboard.plan_page.words import EXAMPLE, LOOKED_AT
from tokentwin.dashboard.planned import FLEETS, Planned, Ways, go_on, inputs_of, keep_link, plan_of
from tokentwin.dashboard.shapes import MOST_REQUESTS
from tokentwin.dashboard.sheet import show as show_report
from tokentwin.dashboard.shown import literal, prose, sentence, verbatim
from tokentwin.dashboard.trust_page.own_question import judged, questions
from tokentwin.dashboard.trust_page.results import readable_external, trust_on
from tokentwin.dashboard.url import in_url, keep, link, named, open_kept, opened_with, pick
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.plan.answer import length_histogram
from tokentwin.planning.plan.document import Lengths, PlanDocument, clients_in_words, percent, traffic_in_words
from tokentwin.planning.plan.most_clients import MostClientsDocument
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.offered_load import clients_load, over_time
from tokentwin.planning.plan.planner import expected_s
from tokentwin.planning.plan.request import FleetRequest, PlanRequest
from tokentwin.planning.plan.sentences import risk, risk_of_mix
from tokentwin.planning.progress import in_words
from tokentwin.planning.traffic import Offered, clients_of
from tokentwin.serving.answers.figures import counted, shown_usd
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import defined_in

_VIEWS = {"fleet": "The recommended fleet", FLEETS: "All fleets and the frontier"}
_VIEW = ("plan", "show", "fleet", "pin")  # parameters that are no inputs of the plan
_GLANCE = 20_000  # maximum number of requests read for the lengths
_SIMULATE_SINGLE = "Simulate the best single kind and open its run"
_NOT_YET = "There is no answer for these inputs yet."
_AGAIN = "A complete plan for these inputs has all figures and plots."
_FEW = 2000  # maximum number of requests read for an estimate


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({}), own_policies: bool = False) -> None:
    """Draw the page; jobs and uploads are kept under `runs`.

    If `own_policies` is set, users may upload policies, which are code.
    """
    opened = _opened(runs)
    try:
        with st.sidebar:
            request = plan_inputs(runs, own_policies)
        if isinstance(request, Incomplete):
            st.title("Which fleet?", anchor=False)
            st.info(request.what)
            return
        parse_objectives(request.slos)
        if isinstance(request, FleetRequest):
            _borne(runs, request)
        else:
            _planned(runs, request, ways, opened)
    except UserError as error:
        st.title("Which fleet?", anchor=False)
        mistake(error, runs)


def _opened(runs: Path) -> str:
    """Take the inputs of the plan that a new link names, if it is on this server, and return its name."""
    name = opened_with("plan")
    keep("plan", "")
    if not name:
        return ""
    if (inputs := inputs_of(runs, name)) is not None:
        open_kept(inputs, _VIEW)
        return name
    if not link().keys() - set(_VIEW):
        st.info(f"The plan {verbatim(name[:40])} of this link is not on this server. The page shows its first inputs.")
    return ""


def _planned(runs: Path, request: PlanRequest, ways: Ways, opened: str) -> None:
    """Draw the plan of the inputs, which are those of the plan `opened` if the link names one."""
    settings = request.as_json()
    job = Job(runs / "jobs", PLAN, settings)
    computed = job.result
    answer = computed or bundled_answer(settings)
    name = EXAMPLE if answer and not computed else job.id
    keep("plan", name, "" if named("plan") else name, lasting=False)
    if opened not in ("", EXAMPLE, name):
        st.info("The plan of this link is of another version of tokentwin, which understood its inputs otherwise.")
    keep_link(job, {parameter: values for parameter, values in link().items() if parameter not in _VIEW})
    if answer:
        st.session_state[LOOKED_AT] = name
        key = f"{job.directory} {stamp(job.directory)}" if computed else EXAMPLE
        plan = Planned(name, settings, _read(key, answer))
        drawn = _figures(key, plan.answer)
        if not computed:
            _example(job)
        _answer(plan, drawn, runs, ways)
        pinned_plan(runs, plan)
        show_traffic(blocks, plan.answer.traffic, {**drawn, **_clients(request)})
    elif (early := plan_of(job)) is not None:
        offer(job, _AGAIN, "Complete the plan", "find", watched=COARSE)
        st.caption("The fleet is final. Plots of other fleets, other rates and other engines are simulated last.")
        st.session_state[LOOKED_AT] = job.id
        _answer(early, figures(early.answer), runs, ways)
    else:
        offered = json.dumps([settings.get(name) for name in Offered.model_fields], sort_keys=True)
        requests, about, drawn = _traffic(offered, request)  # refuses traffic that is too long to plan for
        st.title("Which fleet?", anchor=False)
        _unanswered(job, requests, request, answered=what_if_line(runs, request))
        show_traffic(blocks, about, {**drawn, **_clients(request)})


def _example(job: Job) -> None:
    """Say that the answer is bundled, and draw a button that computes it on this server."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        example = "This is the **bundled example**. Change the inputs to plan your own fleet, or compute it here."
        st.caption(f":material/inventory_2: {example}", width="content")
        if not follow(job).active and st.button("Make it mine", key="mine", type="tertiary", icon=":material/person:"):
            start(job)


def _borne(runs: Path, request: FleetRequest) -> None:
    """Show how many clients a fleet bears."""
    st.title("How many users?", anchor=False)
    job = Job(runs / "jobs", MOST_CLIENTS, request.as_json())
    offered = json.dumps(request.model_dump(mode="json", include=set(Offered.model_fields)), sort_keys=True)
    _, about, drawn = _traffic(offered, request)  # refuses traffic that is too long
    if (computed := job.result) is None:
        fleets = f"{counted(request.replicas, 'replica')} of {counted(request.combinations, 'candidate')}"
        why = f"There is no answer for these inputs yet. Fewer and more clients are simulated on {fleets}."
        offer(job, why, "Find the number", "find")
    else:
        answer = MostClientsDocument.read(computed)
        downloads(answer, "users")
        show_report(blocks, answer.report())
    show_traffic(blocks, about, drawn)


@st.cache_resource(max_entries=16, show_spinner=False)
def _read(key: str, _answer: Mapping[str, Any]) -> PlanDocument:
    return PlanDocument.read(_answer)


@st.cache_resource(max_entries=16, show_spinner=False)
def _figures(key: str, _answer: PlanDocument) -> dict[str, go.Figure]:
    """Return the figures of an answer, cached: Plotly takes most of the page's time."""
    return figures(_answer)


def _unanswered(job: Job, requests: int, request: PlanRequest, answered: bool) -> None:
    """Draw the button that starts the plan, or the progress with a first answer; until then, estimates below.

    If a plan before has `answered` the fleet, there are no estimates.
    """
    candidates = request.combinations
    why = (
        f"{_AGAIN if answered else _NOT_YET} Simulating {counted(candidates, 'candidate')} with "
        f"{counted(requests, 'request')} takes about {in_words(expected_s(requests, candidates))} if this server does "
        "nothing else." + ("" if answered else " A first answer comes much earlier.")
    )
    first = job.document(COARSE) if offer(job, why, "Find the fleet", "find", watched=COARSE) else None
    if first:
        _said(first)
    elif not answered:
        estimates_table(*_estimates(job.id, request))


@st.cache_data(max_entries=64, show_spinner=False)
def _estimates(key: str, _request: PlanRequest) -> Any:
    return estimates(_request, glance(_request, _FEW))


def _said(on_the_way: Mapping[str, str] | None) -> None:
    if on_the_way is not None and "said" in on_the_way:
        st.header(literal(sentence(on_the_way["said"])), anchor=False)
        st.caption("The complete answer follows.")


def _answer(plan: Planned, drawn: Mapping[str, go.Figure], runs: Path, ways: Ways) -> None:
    """Draw the answer of a plan; while it is not complete, there is no button that simulates its fleet."""
    answer, best = plan.answer, plan.answer.recommendation
    if best is None:
        st.title("A mixed fleet" if answer.feasible else "No fleet", anchor=False)
        if answer.feasible:
            st.info(literal(answer.answer))
        else:
            st.error(literal(answer.answer), icon=":material/block:")
        downloads(answer, "plan")
        show_others(blocks, answer)
        return
    published = readable_external(runs)
    st.title(words.answer_name(answer, best), anchor=False)
    asked = " · ".join(map(literal, (plan.model, plan.traffic, ", ".join(map(prose, answer.objectives)))))
    said = risk(best.holds, best.choices) if (mix := answer.winning_mix) is None else risk_of_mix(mix)
    st.markdown(f"**{literal(said)}** For {asked}.", help=defined_in(f"SLO {asked}"))
    if answer.mixed:
        st.info(literal(answer.mixed))
    with st.container(horizontal=True, vertical_alignment="center"):
        gpus, predicted = words.trusted_part(answer, best)
        blocks.badge(least_certain([trust_on(published, gpu, predicted) for gpu in gpus]))
        run = st.container(width="content")
        downloads(answer, "plan")
        go_on(runs, plan, ways, "Plan")
    if plan.complete:
        run_of(runs, plan, best, ways, run, "Simulate it and open its run" if mix is None else _SIMULATE_SINGLE)
    for verdict in [judged(question, published) for question in questions(answer)] if published else []:
        st.caption(f"{literal(verdict.sentence)} [See Trust](trust?plan={plan.name})")
    if answer.too_short:
        most = f" This page simulates at most {MOST_REQUESTS:,} requests; `tokentwin plan` has no such limit."
        blocks.warning(sentence(answer.too_short) + (most if answer.requests == MOST_REQUESTS else ""))
    show_winning_mix(blocks, answer, best)
    _choices(answer)
    if pick("Show", list(_VIEWS), "show", _VIEWS.__getitem__) == FLEETS:
        show_fleets(runs, plan, ways)
        return
    show_recommended(blocks, answer, best, drawn)
    show_others(blocks, answer)


def _choices(answer: PlanDocument) -> None:
    """Draw a card with a fleet for each level of risk."""
    cards = words.choice_cards(answer)
    for place, (name, (choice, taken)) in zip(st.columns(max(len(cards), 1), gap="small"), cards.items(), strict=False):
        with place.container(border=True, height="stretch"):
            st.markdown(f"**{choice.gpus:,} GPUs** {name}" + (" :blue-badge[recommended]" if taken else ""))
            holds = "an unknown share" if choice.holds is None else percent(choice.holds)
            broken = (
                f" If steps are slow, {literal(choice.broken_if_slow)} would break." if choice.broken_if_slow else ""
            )
            st.caption(
                f"\\{shown_usd(choice.usd_per_hour)}/h. The SLOs hold in {holds} of cases. "
                f"The SLOs are kept by {literal(choice.attained)} of the requests.{broken}"
            )


@st.cache_data(max_entries=16, show_spinner="Looking at the traffic")
def _traffic(key: str, _request: PlanRequest) -> tuple[int, str, dict[str, go.Figure]]:
    """Return the number of requests, a sentence about them, and figures of the first of them."""
    requests = list(glance(_request, _GLANCE).requests)
    count = round(_request.expected_requests or len(requests))
    seconds = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9 * (count - 1) / (len(requests) - 1)
    rate = (count - 1) / seconds if seconds else None
    prompts, outputs = [r.prompt_len for r in requests], [r.output_len for r in requests]
    means = sum(prompts) / len(prompts), sum(outputs) / len(outputs)
    loop = _request.loop
    about = clients_in_words(clients_of(loop), None, *means) if loop else traffic_in_words(count, seconds, rate, *means)
    histograms = Lengths(prompt=length_histogram(prompts), output=length_histogram(outputs))
    drawn = {"lengths": plan_charts.lengths(histograms)}
    if loop is None:
        drawn |= plan_charts.over_time(over_time(requests))
    return count, about, drawn


def _clients(request: PlanRequest) -> dict[str, go.Figure]:
    """Return the figure `clients` if clients wait for answers."""
    loop = request.loop
    if loop is None:
        return {}
    bounds = dict(parse_objectives(request.slos).bounds)
    slowest_ms = bounds.get("e2e_ms")
    if slowest_ms is None and "ttft_ms" in bounds and "tpot_ms" in bounds:
        slowest_ms = bounds["ttft_ms"] + max(loop.output.expected - 1, 0) * bounds["tpot_ms"]
    return {"clients": plan_charts.clients(clients_load(loop), slowest_ms and slowest_ms / 1e3)}
