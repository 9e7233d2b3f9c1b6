"""Trust: the simulator's error against the real engine and other engines, and the cases that were never compared.

The page opens on bundled results if there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import plotly.graph_objects as go
import streamlit as st

from tokentwin.calibration.validation.evidence import trust_in_report
from tokentwin.calibration.validation.report import REPORT, ValidationReport, load_report, resolve
from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import badge, data_table, mistake
from tokentwin.dashboard.bundled import DEMO, DEMO_ON_VLLM, bundled_recordings
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.library import RECORDING, find
from tokentwin.dashboard.loading import BY_FILES, open_run
from tokentwin.dashboard.plan_page.words import EXAMPLE
from tokentwin.dashboard.planned import Ways, planned_or_bundled, strip
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.shown import literal, sentence, when
from tokentwin.dashboard.slos import asked_slos
from tokentwin.dashboard.trust_page.answer import (
    ComparedLatencies,
    compared_latencies,
    figures,
    show_engines,
    show_published,
    show_runs,
    show_steps,
)
from tokentwin.dashboard.trust_page.asked_question import asked_question, is_asked
from tokentwin.dashboard.trust_page.domain_view import show_domain
from tokentwin.dashboard.trust_page.own_question import Question, judged, questions
from tokentwin.dashboard.trust_page.results import (
    Clients,
    Decisions,
    External,
    decision_rows,
    newest_clients,
    newest_decisions,
    newest_external,
)
from tokentwin.dashboard.trust_page.rungs import LADDER, Rung, rungs
from tokentwin.dashboard.trust_page.words import FLOOR, disturbance, engine_of, made_of
from tokentwin.dashboard.url import choose, in_url, named, part_in_url, pick
from tokentwin.planning.exports.validation import Validation
from tokentwin.planning.learn.watched import FILE as WATCHED
from tokentwin.planning.learn.watched import read_look
from tokentwin.planning.measure.front_door import clients_table
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.serving.errors import UserError

Results = TypeVar("Results")

BUNDLED = "bundled: tokentwin demo"
BUNDLED_VLLM = "bundled: tokentwin demo --engine vllm"
_MOST_REPORTS = 20  # reports among which other engines are looked for
_VIEWS = {"runs": "Whole runs", "steps": "Single steps", "domain": "Measured steps", "engines": "Other engines"}
_PREDICTIONS = {"blind": "Blind", "anchored": "Anchored"}
_ANSWERS = {"Yes": ("green", "check_circle"), "Partly": ("orange", "contrast"), "No": ("red", "cancel")}
_OWN = (
    "The evidence is published runs, each predicted without its own "
    "measurements. Yes means that runs with the same GPU, model, precision of weights and KV cache, tensor parallelism "
    "and kind of load (open or closed loop), and half to twice the concurrent requests per replica, state the figures "
    "of your SLOs, lie in their 90 % bands, and have median errors of at most 25 %."
)


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the reports under `runs`, or over the bundled ones if there are none."""
    asked, linked = is_asked(), named("plan")
    plan = planned_or_bundled(runs)
    mine = plan if linked or not asked or (plan and plan.name != EXAMPLE) else None
    strip(runs, mine, ways, "Trust")
    st.title("Can you trust the numbers?", anchor=False)
    _changed_servers(runs, ways)
    external = _newest(newest_external, runs)
    if external is not None:
        first = tuple(questions(plan.answer)) if plan else ()
        for question in first if mine else ():
            _judged(question, external)
        with st.expander("Ask about another model, GPU, engine, precision, load or figure", expanded=asked):
            try:
                _judged(asked_question(external, first[0] if first else None), external)
            except UserError as error:
                mistake(error)
    own = find(runs, REPORT, named("report"))
    reports = own or {BUNDLED: DEMO / "validation", BUNDLED_VLLM: DEMO_ON_VLLM / "validation"}
    title, beside = st.columns((2, 1), vertical_alignment="bottom")
    title.header("The simulator against a real run", anchor=False)
    with beside:
        name = choose("Validation report", list(reports), "report", lasting=False)
    try:
        report = load_report(reports[name])
    except UserError as error:
        mistake(error, runs)
        return
    if not own:
        st.caption(
            "There is no validation report here yet. This report is **bundled**; `tokentwin demo` makes one of your "
            "machine."
        )
    _verdict(report)
    with st.container(horizontal=True, vertical_alignment="center"):
        badge(trust_in_report(report))
        downloads(Validation(reports[name], runs if own else None), name)
    _view(runs, reports[name], report, external, bool(own), _engines(report, reports))
    decisions, clients = _newest(newest_decisions, runs), _newest(newest_clients, runs)
    with st.expander("Seven checks of the simulator, from single decisions to the choice of a configuration"):
        _ladder(rungs(report, external, clients, decisions))
        if decisions is not None:
            _decisions(decisions)
        if clients is not None:
            _clients(clients)
    _trust(report)
    _beneath(ways)


def _beneath(ways: Ways) -> None:
    """Draw links to the pages with the evidence beneath this one."""
    there = [(ways[title], icon, what) for title, (icon, what) in _EVIDENCE.items() if title in ways]
    if not there:
        return
    st.header("The evidence beneath", anchor=False)
    with st.container(horizontal=True):
        for page, icon, what in there:
            st.page_link(page, label=f"{page.title}: {what}", icon=f":material/{icon}:")


_EVIDENCE = {
    "Step": ("layers", "the cost of one engine step"),
    "Calibration": ("tune", "measured kernel times, and their errors"),
    "Claims": ("fact_check", "what is said about inference, checked"),
}


@st.fragment
@part_in_url
def _view(
    runs: Path,
    directory: Path,
    report: ValidationReport,
    external: External | None,
    own: bool,
    by_engine: Mapping[str, ValidationReport],
) -> None:
    """Draw the chosen view, without the rest of the page; other views are not made."""
    view = pick("View", list(_VIEWS), "view", show=_VIEWS.__getitem__)
    if view == "runs":
        latencies = compared_latencies(directory, report, lambda path: open_run(path)[1])
        read = (len(latencies.real), latencies.simulated is not None)
        slos = asked_slos()
        bounds = parse_objectives(slos).bounds if slos else ()
        show_runs(blocks, latencies, report, _figures(directory, read, bounds, latencies, report))
        if len(by_engine) > 1:
            show_engines(blocks, by_engine)
    elif view == "steps":
        try:
            show_steps(blocks, directory, report)
        except UserError as error:
            mistake(error, runs)
    elif view == "domain":
        simulated, recordings = report.recordings.simulated, find(runs, RECORDING, named("scenario"))
        if not own:
            recordings |= bundled_recordings()
        first = resolve(directory, simulated) if simulated else None
        show_domain(runs, recordings, str(directory), first, report.calibration)
    elif external is not None:
        chosen = pick("Prediction", list(_PREDICTIONS), "prediction", show=_PREDICTIONS.__getitem__)
        show_published(blocks, external, "anchored" if chosen == "anchored" else "blind")


def _engines(report: ValidationReport, reports: Mapping[str, Path]) -> dict[str, ValidationReport]:
    """Return the report by the name of its engine, and the newest report of each other engine among `reports`."""
    by_engine = {engine_of(report): report}
    for path in list(reports.values())[:_MOST_REPORTS]:
        with suppress(UserError):  # a damaged report says so when it is chosen
            other = load_report(path)
            by_engine.setdefault(engine_of(other), other)
    return by_engine


def _newest(read: Callable[[Path], Results | None], runs: Path) -> Results | None:
    """Return the newest results of a rung under `runs`; None without any, and None with an error line if damaged."""
    try:
        return read(runs)
    except UserError as error:
        mistake(error, runs)
        return None


def _changed_servers(runs: Path, ways: Ways) -> None:
    """Draw a line for each learnt server whose last look saw a change: its twin predicts the server of before."""
    for name, folder in find(runs, WATCHED).items():
        seen = read_look(folder)
        if seen is None or not seen.drifted:
            continue
        blocks.warning(f"{name}: {seen.headline()} ({seen.at}).")
        if server := ways.get("Your server"):
            label = f"See {literal(name)} on Your server"
            st.page_link(server, label=label, icon=":material/fingerprint:", query_params={"server": name})


def _judged(question: Question, external: External) -> None:
    """Draw the verdict on a question."""
    verdict = judged(question, external)
    colour, icon = _ANSWERS[verdict.answer]
    with st.container(border=True):
        asked = f"{literal(question.model)} on {literal(question.gpu)}"
        st.header(f":{colour}[:material/{icon}:] {verdict.answer}, for {asked}", anchor=False, help=_OWN)
        st.markdown(literal(verdict.why))
        blocks.facts(Fact(name, value) for name, value in verdict.figures.items())


def _verdict(report: ValidationReport) -> None:
    blocks.text(f"Compared: {made_of(report)}", soft=True)
    st.markdown(f"**{literal(sentence(report.verdict.rstrip('.')))}**", help=FLOOR)
    if warning := disturbance(report):
        blocks.warning(warning)


def _ladder(climbed: Sequence[Rung]) -> None:
    """Draw the rungs, no more than three in a row, so that they stay readable at 800 pixels."""
    st.caption(LADDER)
    for row in (climbed[:3], climbed[3:5], climbed[5:]):
        for place, rung in zip(st.columns(len(row), gap="small"), row, strict=True):
            with place.container(border=True, height="stretch"):
                st.markdown(f"**{rung.title}**")
                if rung.headline:
                    st.markdown(f":{rung.colour}[:material/{rung.symbol}:] {rung.headline}")
                st.caption(literal(rung.detail))


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs=BY_FILES)
def _figures(
    directory: Path,
    read: tuple[int, bool],
    bounds: tuple[tuple[str, float], ...],
    _latencies: ComparedLatencies,
    _report: ValidationReport,
) -> dict[str, go.Figure]:
    """Return the figures, cached: `read` says how many repeats could be read, and whether the simulated run could."""
    return figures(_latencies, _report, bounds)


def _decisions(decisions: Decisions) -> None:
    """Draw the utility of choices by several rules."""
    st.header("Choices among measured configurations", anchor=False)
    ours = decisions.ours
    st.caption(
        f"{ours.questions:,} questions about {ours.groups} groups of measured configurations: which configuration has "
        "the most output tokens per second per GPU within bounds on TTFT and TPOT? Utility is the measured throughput "
        "of the choice, divided by the best throughput within the bounds. It is 0 if the choice breaks a bound."
    )
    data_table(decision_rows(decisions), {"utility (%)": "%.0f", "broken SLOs (%)": "%.0f"})


def _clients(clients: Clients) -> None:
    """Draw what clients of a server saw, beside the simulation."""
    st.header("Latencies that clients of a server saw", anchor=False)
    blocks.table(clients_table(clients.rows))
    made = when(clients.created) or "undated"
    st.caption(literal(f"From `tokentwin validate front-door`, {made}, with the runs {', '.join(clients.clients)}."))


def _trust(report: ValidationReport) -> None:
    with st.expander("Where this was measured"):
        if report.known_speed_rows and report.disturbance:
            st.caption(literal(f"While the real engine ran, {report.disturbance}."))
        if report.hardware:
            st.table({name: str(value) for name, value in report.hardware.items()})
