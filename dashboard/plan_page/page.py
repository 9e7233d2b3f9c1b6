"""Plan: the cheapest fleet that keeps its SLOs on given traffic, as a sentence and what stands behind it.

The inputs name a job. A link to them finds its answer again, whoever asked first; the page itself computes nothing that
takes long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from calibration.provenance import ASSUMED, Provenance
from dashboard.blocks import BARE, badge, figure, heading, mistake, table
from dashboard.bundled import bundled_answer
from dashboard.downloads import downloads
from dashboard.fleet_run import run_of
from dashboard.job_view import offer
from dashboard.kept_inputs import Incomplete
from dashboard.library import stamp
from dashboard.plan_page import charts as plan_charts
from dashboard.plan_page import words
from dashboard.plan_page.estimates import estimates, estimates_table
from dashboard.plan_page.inputs import plan_inputs
from dashboard.plan_page.tasks import COARSE, PLAN, glance
from dashboard.plan_page.words import EXAMPLE, LOOKED_AT
from dashboard.planned import Planned, Ways, go_on
from dashboard.shapes import MOST_REQUESTS
from dashboard.shown import literal, sentence, verbatim
from dashboard.trust_page.external_results import error_line, newest_external
from dashboard.url import in_url
from planning.jobs.job import Job
from planning.plan.answer import length_histogram
from planning.plan.document import Lengths, PlanDocument, Recommendation, percent
from planning.plan.frontier import Fleet
from planning.plan.headline import first_answer, risk
from planning.plan.objectives import parse_objectives
from planning.plan.planner import expected_s
from planning.plan.request import PlanRequest
from planning.progress import in_words
from planning.traffic import Offered
from serving.deployments.config import parse
from serving.errors import UserError
from serving.metrics import METRICS, metric

_GLANCE = 20_000  # requests that say what the lengths are like
_FEW = 2000  # that say enough for an estimate


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """The page; jobs and uploads are kept under `runs`."""
    try:
        with st.sidebar:
            request = plan_inputs(runs)
        if isinstance(request, Incomplete):
            st.title("Which fleet?", anchor=False)
            st.info(request.what)
            return
        parse_objectives(request.slos)
        _planned(runs, request, ways)
    except UserError as error:
        st.title("Which fleet?", anchor=False)
        mistake(error, runs)


def _planned(runs: Path, request: PlanRequest, ways: Ways) -> None:
    settings = request.as_json()
    job = Job(runs / "jobs", PLAN, settings)
    found = job.result
    if answer := found or bundled_answer(settings):
        st.session_state[LOOKED_AT] = job.id if found else EXAMPLE
        key = f"{job.directory} {stamp(job.directory)}" if found else EXAMPLE
        plan = Planned(st.session_state[LOOKED_AT], settings, _read(key, answer))
        drawn = _figures(key, plan.answer)
        _answer(plan, drawn, runs, ways)
        _traffic(words.traffic_told(plan.answer), drawn["lengths"], request)
    else:
        offered = json.dumps([settings.get(name) for name in Offered.model_fields], sort_keys=True)
        requests, told, lengths = _sizes(offered, request)  # what cannot be planned for is refused here
        _unanswered(job, requests, request)
        _traffic(told, plan_charts.lengths(lengths), request)


@st.cache_resource(max_entries=16, show_spinner=False)
def _read(key: str, _answer: Mapping[str, Any]) -> PlanDocument:
    return PlanDocument.read(_answer)


@st.cache_resource(max_entries=16, show_spinner=False)
def _figures(key: str, _answer: PlanDocument) -> dict[str, go.Figure]:
    """Those of an answer, by name: Plotly takes most of what the page takes."""
    drawn = {**plan_charts.latencies(_answer), "lengths": plan_charts.lengths(_answer.lengths)}
    if best := _answer.recommendation:
        drawn["attainment"] = plan_charts.attainment(_answer.by_replicas, best.replicas)
        drawn["prices"] = plan_charts.prices([best, *_answer.runners_up], _answer.spares)
    return drawn


def _unanswered(job: Job, requests: int, request: PlanRequest) -> None:
    st.title("Which fleet?", anchor=False)
    estimates_table(*_estimates(job.id, request))
    candidates = request.combinations
    why = (
        f"These inputs have no answer yet. To try {candidates:,} candidate{'' if candidates == 1 else 's'} on "
        f"{requests:,} requests takes about {in_words(expected_s(requests, candidates))} on this server if nothing "
        "else runs there. A first answer comes much earlier."
    )
    if offer(job, why, "Find the fleet", "find", watched=COARSE):
        _first_answer(job.document(COARSE), job.settings["spares"])


@st.cache_data(max_entries=64, show_spinner=False)
def _estimates(key: str, _request: PlanRequest) -> Any:
    return estimates(_request, glance(_request, _FEW))


def _first_answer(coarse: Mapping[str, Any] | None, spares: int) -> None:
    if coarse is None:
        return
    points = [parse(Fleet, point, where="first answer") for point in coarse["points"]]
    st.subheader(_escaped(first_answer(points, spares)), anchor=False)
    st.caption(_FIRST)


def _answer(plan: Planned, drawn: Mapping[str, go.Figure], runs: Path, ways: Ways) -> None:
    answer, best = plan.answer, plan.answer.recommendation
    if best is None:
        st.title("No fleet", anchor=False)
        st.error(literal(answer.answer), icon=":material/block:")
        downloads(answer, "plan")
        _rest(answer)
        return
    spares = answer.spares
    st.title(words.fleet_name(best, spares), anchor=False)
    st.markdown(f"**{risk(best.choices)}**")
    with st.container(horizontal=True, vertical_alignment="center"):
        badge(words.provenance(best.standing))
        run = st.container(width="content")
        downloads(answer, "plan")
        go_on(runs, plan, ways, "Plan")
    run_of(runs, plan, best, ways, run, "Simulate it and open its run")
    _published_error(runs, answer.gpu_of(best))
    _warn_of_short_traffic(answer)
    _choices(answer)
    _headline(answer, best)
    for told in answer.near_ties:
        st.markdown(f"**Close to it:** {literal(told)}")
    left, right = st.columns(2, gap="medium")
    with left:
        rated = words.provenance_of(answer.by_replicas, "simulated fleets")
        figure(drawn["attainment"], "attainment", "How many replicas", rated, _HELP["replicas"])
    with right:
        heading(words.why_not_fewer(best, spares), None)
        st.markdown(sentence(literal(answer.why_not_fewer or "")))
        if best.breaks_first:
            st.markdown(
                f"When traffic grows by more than **{best.headroom_percent} %**, "
                f"**{literal(best.breaks_first)}** breaks first."
            )
        rated = words.provenance_of([best, *answer.runners_up], "fleets")
        figure(drawn["prices"], "prices", "What each fleet costs", rated, small=True)
    _latencies(answer, drawn)
    if best.vllm_serve:
        st.subheader("Serve it with vLLM", anchor=False, help=_HELP["serve"])
        # As text: Streamlit's highlighter of code is nearly as large as Plotly, and would hold up the first figure.
        st.markdown(f"`{best.vllm_serve}`")
    _rest(answer)


def _published_error(runs: Path, gpu: str) -> None:
    """How far predictions are off; nothing where results are damaged, of which the Trust page tells."""
    with suppress(UserError):
        if told := error_line(newest_external(runs), gpu):
            st.caption(f"{literal(told)} [See Trust](trust)")


def _warn_of_short_traffic(answer: PlanDocument) -> None:
    if not answer.too_short:
        return
    most = f" This page simulates no more than {MOST_REQUESTS:,} requests; `tokentwin plan` takes any number."
    limited = most if answer.requests == MOST_REQUESTS else ""
    st.warning(sentence(literal(answer.too_short)) + limited, icon=":material/hourglass_bottom:")


def _choices(answer: PlanDocument) -> None:
    """What each appetite for risk would take."""
    cards = words.choice_cards(answer)
    for place, (name, (choice, taken)) in zip(st.columns(max(len(cards), 1), gap="small"), cards.items(), strict=False):
        with place.container(border=True, height="stretch"):
            st.markdown(f"**{choice.gpus:,} GPUs** {name}" + (" :blue-badge[recommended]" if taken else ""))
            holds = "an unknown share" if choice.holds is None else percent(choice.holds)
            st.caption(
                f"\\${choice.usd_per_hour:,.2f}/h. The SLOs hold in {holds} of cases. If steps are slow, "
                f"{100 * choice.if_slow:.1f} % of the requests keep them."
            )


def _headline(answer: PlanDocument, best: Recommendation) -> None:
    helps = {
        "GPUs": _plausible(best),
        "$ per Mtok output": _HELP["price"],
        "attainment": _HELP["attainment"],
        "headroom": _HELP["headroom"],
        "tok/s per user": metric("tok_s_user").help,
    }
    bands = words.headline_bands(answer)
    with st.container(horizontal=True, gap="medium"):
        for name, value in words.headline(best).items():
            band = _escaped(bands[name]) if name in bands else None
            help = helps.get(name)
            st.metric(_escaped(name), _escaped(value), band, "off", help=help, width="content", delta_arrow="off")
    st.caption("In grey are 90 % bands over what steps may take.")


def _plausible(best: Recommendation) -> str:
    drawn = f"On other random draws of the traffic the SLOs hold in {best.elsewhere}."
    elsewhere = drawn if best.elsewhere else "Other traffic was not tried."
    return f"It takes {best.plausible} GPUs when step times lie at an end of their 90 % interval. {elsewhere}"


def _latencies(answer: PlanDocument, drawn: Mapping[str, go.Figure]) -> None:
    names = [name for name in drawn if name in METRICS]
    rated = words.provenance_of(answer.by_rate, "rates")
    for place, name in zip(st.columns(2, gap="medium") if names else (), names, strict=True):
        with place:
            figure(drawn[name], f"rate_{name}", f"{metric(name).label} against traffic", rated, _HELP["latency"])


def _rest(answer: PlanDocument) -> None:
    """What else was looked at, and why it is not the answer."""
    rows = words.alternatives(answer)
    if len(rows) > bool(answer.recommendation):
        st.subheader("Other candidates", anchor=False)
        priced = [row for row in rows if "$/h" in row]
        if priced:
            table(priced, words.FORMATS, dict.fromkeys(words.ROOM, words.ROOM_HELP))
        for row in rows:
            if row not in priced:  # its reason is too long for a cell
                st.caption(f"**{verbatim(row['fleet'])}** is {verbatim(row['verdict'])}{_room(row)}")


def _room(row: Mapping[str, Any]) -> str:
    """What an engine's KV memory holds, as the end of a sentence; nothing for a model that does not fit."""
    tokens, requests = (row.get(column) for column in words.ROOM)
    return "" if tokens is None else f" (KV room for {tokens:,} tokens, {requests:,} requests)"


def _traffic(told: str, plot: go.Figure, request: PlanRequest) -> None:
    with st.container():
        above = st.container()
        st.caption(told)
        figure(plot, "lengths", "The traffic", _of_traffic(request), place=above, menu=BARE)


def _of_traffic(request: PlanRequest) -> Provenance:
    if request.recorded:
        return Provenance(ASSUMED, "the requests are those of the uploaded trace")
    return Provenance(ASSUMED, "the requests were drawn from the chosen lengths and rate")


@st.cache_data(max_entries=16, show_spinner="Looking at the traffic")
def _sizes(key: str, _request: PlanRequest) -> tuple[int, str, Lengths]:
    """Requests in all, what they are in a sentence, and the lengths of prompts and outputs, of very many the first."""
    requests = list(glance(_request, _GLANCE).requests)
    count = round(_request.expected_requests or len(requests))
    seconds = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9 * (count - 1) / (len(requests) - 1)
    prompts, outputs = [r.prompt_len for r in requests], [r.output_len for r in requests]
    told = words.told_of(count, seconds, sum(prompts) / len(prompts), sum(outputs) / len(outputs))
    return count, told, Lengths(prompt=length_histogram(prompts), output=length_histogram(outputs))


def _escaped(text: str) -> str:
    """Text of which no dollar sign starts a formula."""
    return text.replace("$", "\\$")


_FIRST = (
    "This first answer is optimistic until whole fleets confirm it, which comes next. It is of parts of fleets: one "
    "end of the range on an ordinary stretch of the traffic, the other on the busiest."
)
_HELP = {
    "replicas": "The share of the requests that meet every SLO. The band is its 90 % interval.",
    "attainment": "The share of all requests that meet every SLO. A request that does not finish meets none.",
    "headroom": "How much the same traffic can grow until the fleet breaks an SLO in more cases than you accept.",
    "price": "Dollars per million output tokens in steady operation. The Run page counts the whole run, in which "
    "the fleet also fills and empties, so a token costs more there.",
    "serve": "The command for one replica. Settings that it leaves out are vLLM's defaults on this GPU.",
    "latency": "The recommended fleet with the same requests at lower and higher rates. The knee is the highest rate "
    "that meets every SLO.",
}
