"""Policy lab: two policies or deployments on identical arrivals, and what can be claimed of their difference.

The answers are those of `tokentwin compare`. As on the Plan page, inputs name a job: a link to them finds its answer
again.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from dashboard.blocks import badge, figure, mistake, table, titled
from dashboard.bundled import bundled_answer
from dashboard.downloads import downloads
from dashboard.job_view import offer, start_once
from dashboard.kept_inputs import Incomplete
from dashboard.library import find
from dashboard.planned import TO_COMPARE, Planned, Ways, planned, strip
from dashboard.policy_lab_page import charts as lab_charts
from dashboard.policy_lab_page import words
from dashboard.policy_lab_page.charts import Sides, side_colours
from dashboard.policy_lab_page.inputs import recording_inputs, simulation_inputs
from dashboard.policy_lab_page.tasks import RECORDED, SIMULATED
from dashboard.policy_lab_page.words import side_names
from dashboard.shown import capitalised, verbatim
from dashboard.url import in_url, named, pick
from planning.compare.document import ComparisonDocument
from planning.jobs.job import Job
from serving.errors import UserError
from serving.metrics import metric

_RUN = "runs.parquet"
_COMPARE = ("Compare", "compare", "compare_arrows")  # the button
_KINDS = {"simulate": "Simulate", "recordings": "Recordings"}


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """The page; jobs and pasted deployments are kept under `runs`, and recordings are looked for there."""
    plan = planned(runs)
    strip(runs, plan, ways, "Policy lab")
    with titled("Is B better than A?", (3, 2)):
        what = pick("Compare", list(_KINDS), "compare", show=_KINDS.__getitem__)
    try:
        if what == "recordings":
            _recorded(runs)
        else:
            _simulated(runs, plan)
    except UserError as error:
        mistake(error, runs)


def _simulated(runs: Path, plan: Planned | None) -> None:
    request = simulation_inputs(runs, plan)
    if isinstance(request, Incomplete):
        st.info(request.what)
        return
    settings = request.as_json()
    job = Job(runs / "jobs", SIMULATED, settings)
    answer = _found(job)
    if answer is None:
        if plan is not None and st.session_state.pop(TO_COMPARE, None) == plan.name:
            start_once(job)  # it was asked for beside the plan
        offer(job, "These inputs have no answer yet. It takes seconds to a minute.", *_COMPARE)
        return
    _answer(answer)
    _rest(answer)


def _recorded(runs: Path) -> None:
    found = _recordings(runs)
    request = recording_inputs(runs, found)
    if len(found) < 2:
        _how_to_record(runs)
    settings = request.as_json()
    job = Job(runs / "jobs", RECORDED, settings)
    answer = _found(job)
    if answer is None:
        if request.timing is None:  # to compare takes seconds; to simulate the same runs may not
            start_once(job)
        offer(job, "These recordings have not been compared yet.", *_COMPARE)
        return
    _answer(answer)
    _ranking(answer)
    _rest(answer)


def _found(job: Job) -> ComparisonDocument | None:
    """The answer of the job, or the bundled one to its settings."""
    found = job.result or bundled_answer(job.settings)
    return None if found is None else ComparisonDocument.read(found)


def _how_to_record(runs: Path) -> None:
    with st.expander("This pair is bundled. Record your own"):
        st.markdown("This command runs both sides on the engine, three times each in turns, and simulates them:")
        command = "tokentwin compare a.yaml b.yaml --trace TRACE -c CALIBRATION --engine --repeats 3"
        st.code(f"{command} --out {runs.resolve().name}/compared", language="bash", wrap_lines=True)


def _recordings(runs: Path) -> dict[str, Path]:
    """Recordings, and directories that hold several as `compare --engine` leaves them, by name; the newest first."""
    found = find(runs, _RUN, named("rec_a"), named("rec_b"))
    groups = {}
    for name, path in found.items():
        if "/" in name and re.fullmatch(r"run-\d+", path.name):
            groups[name.rpartition("/")[0]] = path.parent
    single = {name: path for name, path in found.items() if name.rpartition("/")[0] not in groups}
    return groups | single


def _answer(answer: ComparisonDocument) -> None:
    colours = side_colours(*(side.deployment.policy for side in (answer.a, answer.b)))
    names = Sides(*side_names(answer.a, answer.b))
    st.subheader(f"{_ICONS[answer.winner, answer.difference]} {verbatim(capitalised(answer.verdict))}", anchor=False)
    rated = words.provenance(answer)
    with st.container(horizontal=True, vertical_alignment="center"):
        badge(rated)
        downloads(answer, "comparison")
    st.caption(words.basis(answer))
    if answer.units.carry_over:
        st.warning(words.CARRIED_OVER, icon=":material/warning:")
    if words.disturbance(answer):
        st.warning(verbatim(words.disturbance(answer)), icon=":material/warning:")
    figure(lab_charts.cdfs(answer.cdfs, names, colours), "cdfs", "Latency of all requests", rated, _HELP["cdfs"])
    left, right = st.columns(2, gap="medium")
    with left:
        claims = lab_charts.differences(answer.rows, colours)
        figure(claims, "differences", "Differences", rated, _HELP["differences"])
    with right:
        tallies = lab_charts.winners(answer.tallies, colours)
        figure(tallies, "winners", "Winners and losers", rated, _HELP["winners"])
        _fairness(answer, names, colours)


def _fairness(answer: ComparisonDocument, names: Sides, colours: Sides) -> None:
    tenants = answer.tenants
    if not tenants:
        return
    served = lab_charts.shares(tenants, names, colours)
    figure(served, "shares", "Share of each tenant", words.provenance(answer), metric("jain_fairness").help)
    st.markdown(words.fairness(answer))


def _ranking(answer: ComparisonDocument) -> None:
    """Whether what the simulator ranks the two by holds in the recordings."""
    simulated, rows = answer.simulated, answer.ranking
    if simulated is None or rows is None:
        return
    figure(
        lab_charts.ranking(rows), "ranking", "Did the simulator see it?", words.provenance(simulated), _HELP["ranking"]
    )
    outcome, told = words.ranking(rows)
    if outcome == "reversed":
        st.error(told, icon=":material/swap_vert:")
    elif outcome == "holds":
        st.success(told, icon=":material/check_circle:")
    else:
        st.info(told)
    st.markdown(f"Simulated: {verbatim(simulated.verdict)}.")
    st.markdown(words.errors(answer))
    with st.expander("Simulated against real"):
        table(words.error_rows(answer), _ERROR_FORMATS, _ERROR, height="content")


def _rest(answer: ComparisonDocument) -> None:
    """The numbers, and the two deployments."""
    with st.expander("The numbers"):
        table(words.number_rows(answer.rows), _FORMATS, _CHANGE)
        st.caption(words.ENDS)
    with st.expander("The two deployments"):
        for place, key, side in zip(st.columns(2), "AB", (answer.a, answer.b), strict=True):
            place.markdown(f"**{key}**" + (f": {side.replicas} × " if (side.replicas or 1) > 1 else ""))
            place.json(side.deployment.as_json(), expanded=1)


_ICONS = {  # by who is better on the whole, and whether anything differs
    ("B", True): ":green[:material/check_circle:]",
    ("A", True): ":red[:material/cancel:]",
    ("", True): ":material/balance:",
    ("", False): ":material/drag_handle:",
}
_HELP = {
    "cdfs": "\n\n".join(metric(name).help for name in lab_charts.LATENCIES),
    "differences": "B compared with A on the same requests. A difference is coloured where its interval leaves 0 out. "
    "A grey one may be chance. A diamond has no interval.",
    "winners": "A request gains or loses when its latency changes by the threshold or more. A request that does not "
    "finish counts as infinitely slow.",
    "ranking": "The recorded workload is simulated with the recorded deployments. The figure has every row in which "
    "the engine or the simulator shows a difference.",
}
_FORMATS = {"A": "%.5g", "B": "%.5g", "B - A (%)": "%+.1f", "from": "%.4g", "to": "%.4g"}
_ERROR_FORMATS = {"simulated": "%.5g", "real": "%.5g", "error (%)": "%+.1f"}
_ERROR = {"error (%)": "Simulated against real, in percent of real; of a share in percentage points."}
_CHANGE = {"B - A (%)": "In percent of A; of a share (attainment, requests that finish) in percentage points."}
