"""Claims: what everyone says about inference, what was found, and the same under conditions of the reader's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import streamlit as st

from calibration.provenance import Provenance
from dashboard.blocks import figure, mistake, table, titled
from dashboard.bundled import SAMPLES
from dashboard.claims_page.charts import cases_chart
from dashboard.claims_page.tasks import CHECK
from dashboard.downloads import downloads
from dashboard.job_view import offer
from dashboard.planned import Planned, Ways, planned, strip
from dashboard.shown import capitalised, literal
from dashboard.url import amount, choose, go_to, in_url, usual_first
from planning.claims.claim import Claim, load_claims
from planning.claims.document import CheckedClaim, ClaimsDocument
from planning.jobs.job import Job
from planning.settings import found_at, overridden
from serving.deployments.gpu_spec import gpus
from serving.deployments.model_catalogue import models
from serving.errors import UserError

CLAIMS = SAMPLES / "claims.json"
_WORST = ("extrapolated", "interpolated", "validated", "")
_TRAFFIC = "offered.traffic"
# What a reader can move: a label, the path in the experiment, and the most it may be.
_NUMBERS = (
    ("Requests a second", f"{_TRAFFIC}.arrivals.rate", 1000.0),
    ("Users who wait for their answers", f"{_TRAFFIC}.arrivals.concurrency", 4096.0),
    ("Tokens of a prompt, on average", f"{_TRAFFIC}.prompt.mean", 100_000.0),
    ("Tokens of a prompt", f"{_TRAFFIC}.prompt.tokens", 100_000.0),
    ("Tokens of an answer, on average", f"{_TRAFFIC}.output.mean", 10_000.0),
    ("Tokens of an answer", f"{_TRAFFIC}.output.tokens", 10_000.0),
    ("Tokens of a system prompt", f"{_TRAFFIC}.system_prompts.tokens.tokens", 100_000.0),
    ("System prompts", f"{_TRAFFIC}.system_prompts.count", 10_000.0),
    ("Tokens of a sequence", "tokens", 1_000_000.0),
)


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """The page, over the bundled answer; what a reader asks is a job under `runs`."""
    plan = planned(runs)
    strip(runs, plan, ways, "Claims")
    claims = load_claims()
    answer = ClaimsDocument.read(json.loads(CLAIMS.read_text()))
    checked = {claim.name: claim for claim in answer.claims if claim.name in claims}
    sentences = {name: claim.claim for name, claim in checked.items()}
    with titled("What everyone says about inference", (1, 1)):
        name = choose("Claim", list(checked), "claim", show=lambda name: sentences.get(name, name))
    downloads(answer, "claims")
    _found(checked[name], claims[name])
    _own(runs, name, claims[name], plan)
    with st.expander("All claims"):
        rows = [{"claim": c.claim, "expected": c.expected, "verdict": c.verdict} for c in checked.values()]
        table(pd.DataFrame(rows))


def _found(checked: CheckedClaim, claim: Claim) -> None:
    st.markdown(f"“{literal(checked.claim)}”")
    st.markdown(f"### {literal(capitalised(checked.verdict))}")
    st.caption(f"{literal(claim.means)} Expected: {checked.expected}.")
    worst = min(checked.cases, key=lambda case: _WORST.index(case.mark) if case.mark in _WORST else 0)
    figure(
        cases_chart(checked.cases, claim.expects),
        "cases",
        "Case by case",
        Provenance(worst.mark, worst.reason),
        marked=True,
    )
    if claim.learnt:
        st.markdown(literal(claim.learnt))


def _own(runs: Path, name: str, claim: Claim, plan: Planned | None) -> None:
    """The claim under conditions that are set here."""
    st.subheader("Under your conditions", anchor=False)
    if conditions := _planned_conditions(name, plan):
        st.button("Take the planned model and GPU", on_click=go_to, kwargs=conditions, icon=":material/dns:")
    case = choose("Start from the case when", [case.when for case in claim.cases], f"case-{name}")
    start = overridden(claim.experiment, next(each.set for each in claim.cases if each.when == case))
    own = claim.as_json() | {"experiment": _moved(name, start), "cases": [{"when": "set as here"}]}
    job = Job(runs / "jobs", CHECK, {"name": name, "claim": own})
    try:
        if offer(job, "This takes some seconds.", "Check", f"check_{name}"):
            return
        if job.result is not None:
            checked = ClaimsDocument.read(job.result).claims[0]
            st.markdown(f"**{literal(capitalised(checked.verdict))}**: {literal(checked.cases[0].number)}")
    except UserError as error:
        mistake(error, runs)


def _planned_conditions(name: str, plan: Planned | None) -> dict[str, str]:
    """What the page has in its address for the model and the GPU of the plan; nothing for what no catalogue holds."""
    best = plan and plan.answer.recommendation
    if plan is None or best is None or plan.model not in models() or plan.answer.gpu_of(best) not in gpus():
        return {}
    size = str(best.deployment.get("tensor_parallel_size", 1))
    return {f"gpu-{name}": plan.answer.gpu_of(best), f"model-{name}": plan.model, f"tp-{name}": size}


def _moved(name: str, start: dict[str, Any]) -> dict[str, Any]:
    """The experiment `start` with what the reader has set."""
    columns = st.columns(3)
    places = iter(columns * len(_NUMBERS))
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
    for label, path, most in _NUMBERS:
        value = found_at(start, path)
        if isinstance(value, (int, float)):
            kind = type(value)
            put(path, _asked(label, f"{path.removeprefix(_TRAFFIC)}-{name}", most, value, kind), value)
    if "deployment.tensor_parallel_size" in changed:
        changed["deployment.tensor_parallel_size"] = int(changed["deployment.tensor_parallel_size"])
    if any(path.startswith("deployment.") for path in changed) and "deployment" not in start:
        changed = {"deployment.device": "cuda", "deployment.gpu_memory_utilization": 0.9} | changed
        changed.setdefault("deployment.model", model)
    return overridden(start, changed)


def _asked(label: str, parameter: str, most: float, value: float, kind: type[Any]) -> Callable[[], Any]:
    low = 1 if kind is int else 0.01
    return lambda: amount(label, parameter, low, most, value, 1, kind=kind, show="%d" if kind is int else "%.6g")
