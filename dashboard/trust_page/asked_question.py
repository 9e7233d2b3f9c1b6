"""A question to Trust without a plan: the reader chooses model, GPU, engine, precisions, shards, load and figure."""

from __future__ import annotations

import streamlit as st

from tokentwin.dashboard.plan_page.inputs import GPUS, MODEL
from tokentwin.dashboard.trust_page.own_question import LOADS, Question, engine_of
from tokentwin.dashboard.trust_page.results import External
from tokentwin.dashboard.url import check_numbers, choose, link, number, usual_first
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models

_WEIGHTS = {"bf16": "16 bits", "fp8": "FP8", "fp4": "FP4", "int4": "INT4"}
_KV_CACHE = ("bf16", "fp8")
_OPEN, _CLOSED = "open", "closed"
_LOADS = {_OPEN: "Open loop: " + LOADS[False], _CLOSED: "Closed loop: " + LOADS[True]}
_FIGURES = {
    f"{name}_ms.{statistic}": f"{name.upper()} {statistic}"
    for name in ("ttft", "tpot", "e2e")
    for statistic in ("p99", "p95", "p90", "p50", "mean")
}


def is_asked() -> bool:
    """Return True if the link has a choice of the question."""
    return any(name.startswith("asked_") for name in link())


def asked_question(external: External, plan: Question | None) -> Question:
    """Draw the choices and return the question; the choices begin with those of a plan.

    Raises UserError for a number out of its range.
    """
    weights = plan.weights if plan and plan.weights in _WEIGHTS else "bf16"
    kept = plan.kv_cache if plan and plan.kv_cache in _KV_CACHE else "bf16"
    arriving = _CLOSED if plan and plan.closed else _OPEN
    figure = next((figure for figure in plan.figures if figure in _FIGURES), "") if plan else ""
    model, gpu, engine = st.columns(3)
    with model:
        served = choose("Model", usual_first(plan.model if plan else MODEL, models()), "asked_model")
    with gpu:
        device = choose("GPU", usual_first(plan.gpu if plan else GPUS[0], gpus()), "asked_gpu")
    with engine:
        engines = sorted({engine_of(case) for case in external.cases} | {"SGLang"})
        kind = choose("Engine", usual_first("vLLM", engines), "asked_engine")
    precision, cache, shards = st.columns(3)
    with precision:
        dtype = choose("Weights", usual_first(weights, _WEIGHTS), "asked_weights", _WEIGHTS.__getitem__)
    with cache:
        kv_cache = choose("KV cache", usual_first(kept, _KV_CACHE), "asked_kv", _WEIGHTS.__getitem__)
    with shards:
        sizes = usual_first(str(plan.shards if plan and plan.shards else 1), ("1", "2", "4", "8"))
        size = int(choose("Tensor parallel", sizes, "asked_tp"))
    loop, load, percentile = st.columns(3)
    with loop:
        closed = choose("Load", usual_first(arriving, _LOADS), "asked_loop", _LOADS.__getitem__) == _CLOSED
    with load:
        usual = round(plan.at_a_time) if plan and plan.at_a_time else 0
        at_a_time = number("Requests at a time", "asked_load", 0, 100_000, usual, help="In one replica; 0: any.")
    with percentile:
        bounded = choose("Figure", usual_first(figure or "ttft_ms.p99", _FIGURES), "asked_figure", _FIGURES.__getitem__)
    check_numbers()
    return Question(device, served, at_a_time or None, dtype, size, (bounded,), kind, kv_cache, closed)
