"""Claims: tests of common claims about inference, and the same tests under the reader's own conditions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import streamlit as st

from tokentwin.calibration.trust import Trust
from tokentwin.dashboard.blocks import data_table, figure, mistake, titled
from tokentwin.dashboard.bundled import SAMPLES
from tokentwin.dashboard.claims_page.charts import cases_chart, terms_chart
from tokentwin.dashboard.claims_page.tasks import CHECK
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.job_view import offer
from tokentwin.dashboard.planned import Planned, Ways, planned, strip
from tokentwin.dashboard.shown import capitalised, literal
from tokentwin.dashboard.url import amount, check_numbers, choose, go_to, in_url, usual_first
from tokentwin.planning.checkout import lab_is_here
from tokentwin.planning.claims.document import CheckedClaim, ClaimsDocument
from tokentwin.planning.deployments import found_at, overridden
from tokentwin.planning.jobs.job import Job
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError

CLAIMS = SAMPLES / "claims.json"
_WORST = ("extrapolated", "interpolated", "validated", "")
_TRAFFIC = "offered.traffic"
_Way = tuple[str, ...]
_MOST = 1_000_000.0
# Labels of an experiment's numbers, by the ends of their paths; other numbers are labelled by their path.
_CALLED = {
    "arrivals.rate": "Requests per second",
    "arrivals.concurrency": "Concurrent users (each waits for an answer)",
    "arrivals.cv": "Burstiness of arrivals",
    "prompt.mean": "Tokens per prompt (mean)",
    "prompt.tokens": "Tokens per prompt",
    "output.mean": "Tokens per answer (mean)",
    "output.tokens": "Tokens per answer",
    "system_prompts.tokens.tokens": "Tokens per system prompt",
    "system_prompts.count": "Number of system prompts",
    "turns.tokens": "Turns per conversation",
    "longest_prompt": "Longest measured prompt (tokens)",
    "tokens": "Tokens per sequence",
    "slo.ttft_ms": "TTFT SLO (ms)",
    "slo.tpot_ms": "TPOT SLO (ms)",
    "acceptance_rate": "Fraction of draft tokens that are accepted",
}
_NOT_MOVED = ("seed", "requests", "tensor_parallel_size", "gpu_memory_utilization", "max", "sigma", "nodes")


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the bundled answer; a reader's own check is a job under `runs`."""
    plan = planned(runs)
    strip(runs, plan, ways, "Claims")
    answer = ClaimsDocument.read(json.loads(CLAIMS.read_text()))
    checked = {claim.name: claim for claim in answer.claims}
    sentences = {name: claim.claim for name, claim in checked.items()}
    with titled("Common claims about LLM inference", (1, 1)):
        name = choose("Claim", list(checked), "claim", show=lambda name: sentences.get(name, name))
    downloads(answer, "claims")
    _results(checked[name])
    _own(runs, name, plan)
    with st.expander("All claims"):
        rows = [{"claim": c.claim, "expected": c.expected, "verdict": c.verdict} for c in checked.values()]
        data_table(rows)


def _results(checked: CheckedClaim) -> None:
    st.markdown(f"“{literal(checked.claim)}”")
    st.header(literal(capitalised(checked.verdict)), anchor=False)
    st.caption(f"{literal(checked.means)} Expected: {checked.expected}.")
    worst = min(checked.cases, key=lambda case: _WORST.index(case.level) if case.level in _WORST else 0)
    figure(
        cases_chart(checked),
        "cases",
        "Results of each case",
        Trust(worst.level, worst.reason),
        marked=True,
    )
    for at, case in enumerate(checked.cases):
        if case.terms:
            known = Trust(case.level, case.reason)
            figure(terms_chart(case.terms), f"terms-{at}", f"The parts of E2E when {case.when}", known)
    for text in (checked.break_even, checked.learnt):
        if text:
            st.markdown(literal(text))
    if checked.engine is not None:
        st.markdown(f"**{literal(checked.engine.number)}** {literal(checked.engine.sentence)}.")


def _own(runs: Path, name: str, plan: Planned | None) -> None:
    """Draw the inputs to check the claim under other conditions, if the dashboard runs in a checkout with `lab`."""
    st.header("Under your conditions", anchor=False)
    if not lab_is_here():
        st.caption("To check claims under other conditions, run the dashboard in a checkout of the repository.")
        return
    from lab.claims.claim import load_claims

    claim = load_claims().get(name)
    if claim is None:
        st.caption("This checkout does not contain this claim.")
        return
    if conditions := _planned_conditions(name, plan):
        st.button("Use the model and the GPU of your plan", on_click=go_to, kwargs=conditions, icon=":material/dns:")
    case = choose("Start with the conditions of", [case.when for case in claim.cases], f"case-{name}")
    start = overridden(claim.experiment, next(first.set for first in claim.cases if first.when == case))
    own = claim.as_json() | {"experiment": _moved(name, start), "cases": [{"when": "set as here"}], "break_even": None}
    job = Job(runs / "jobs", CHECK, {"name": name, "claim": own})
    try:
        check_numbers()
        if offer(job, "The check takes some seconds.", "Check", f"check_{name}"):
            return
        if job.result is not None:
            checked = ClaimsDocument.read(job.result).claims[0]
            st.markdown(f"**{literal(capitalised(checked.verdict))}**: {literal(checked.cases[0].number)}")
    except UserError as error:
        mistake(error, runs)


def _planned_conditions(name: str, plan: Planned | None) -> dict[str, str]:
    """Return the query parameters for the model and the GPU of the plan; empty if the catalogues do not have both."""
    best = plan and plan.answer.recommendation
    if plan is None or best is None or plan.model not in models() or plan.answer.gpu_of(best) not in gpus():
        return {}
    size = str(best.deployment.get("tensor_parallel_size", 1))
    return {f"gpu-{name}": plan.answer.gpu_of(best), f"model-{name}": plan.model, f"tp-{name}": size}


def _moved(name: str, start: dict[str, Any]) -> dict[str, Any]:
    """Return the experiment `start` with the reader's changes."""
    columns = st.columns(3)
    numbers = list(_numbers(start))
    places = iter(columns * (1 + len(numbers)))
    changed: dict[str, Any] = {}

    def put(path: str, draw: Callable[[], Any], usual: Any) -> None:
        with next(places):
            value = draw()
        if value != usual:
            changed[path] = value

    gpu = found_at(start, "gpu", "H100")
    put("gpu", lambda: choose("GPU", usual_first(gpu, gpus()), f"gpu-{name}"), gpu)
    model = found_at(start, "deployment.model", "Llama-3.1-8B")
    put("deployment.model", lambda: choose("Model", usual_first(model, models()), f"model-{name}"), model)
    size = str(found_at(start, "deployment.tensor_parallel_size", 1))
    sizes = usual_first(size, ("1", "2", "4", "8"))
    put("deployment.tensor_parallel_size", lambda: choose("Tensor parallel", sizes, f"tp-{name}"), size)
    set_here: list[tuple[_Way, Any]] = []
    for way, value in numbers:
        with next(places):
            moved = _asked(_called(way), f"{'.'.join(way).removeprefix(_TRAFFIC)}-{name}", value)
        if moved != value:
            set_here.append((way, moved))
    if "deployment.tensor_parallel_size" in changed:
        changed["deployment.tensor_parallel_size"] = int(changed["deployment.tensor_parallel_size"])
    if any(path.startswith("deployment.") for path in changed) and "deployment" not in start:
        changed = {"deployment.device": "cuda", "deployment.gpu_memory_utilization": 0.9} | changed
        changed.setdefault("deployment.model", model)
    made = overridden(start, changed)
    for way, moved in set_here:
        node: Any = made
        for key in way[:-1]:
            node = node[int(key) if isinstance(node, list) else key]
        node[way[-1]] = moved
    return made


def _numbers(node: Any, way: _Way = ()) -> Iterator[tuple[_Way, int | float]]:
    """Yield every number of an experiment that a reader can move, with the keys that lead to it.

    A number that the two sides set is yielded from the sides, not from the base.
    """
    if isinstance(node, dict | list):
        inside = node.items() if isinstance(node, dict) else ((str(at), item) for at, item in enumerate(node))
        of_sides = {*node.get("baseline", {}), *node.get("change", {})} if isinstance(node, dict) and not way else set()
        for key, value in inside:
            yield from (number for number in _numbers(value, (*way, key)) if ".".join(number[0]) not in of_sides)
    elif isinstance(node, int | float) and not isinstance(node, bool) and way[-1].split(".")[-1] not in _NOT_MOVED:
        yield way, node


def _called(way: _Way) -> str:
    path = ".".join(way)
    label = next((label for end, label in _CALLED.items() if f".{path}".endswith(f".{end}")), path)
    if way[0] in ("baseline", "change"):
        return f"{way[0]}: {label.removeprefix(f'{way[0]}.')}"
    return f"{label} ({int(way[2]) + 1})" if way[:2] == ("offered", "traffic") and way[2].isdigit() else label


def _asked(label: str, parameter: str, value: int | float) -> int | float:
    whole = isinstance(value, int)
    low, show = (1, "%d") if whole and value else (0, "%.6g")
    return amount(label, parameter, low, max(_MOST, value), value, 1, kind=type(value), show=show)
