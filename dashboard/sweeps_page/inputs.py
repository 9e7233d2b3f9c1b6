"""Inputs of a new sweep: a form for the usual settings, or the YAML of a sweep's file. Both give the same mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st

from tokentwin.dashboard.deployment_text import MOST_KB, parse_text
from tokentwin.dashboard.kept_inputs import Incomplete, trace_input
from tokentwin.dashboard.own_policy import OWN, policies_title, policy_input
from tokentwin.dashboard.shapes import shapes
from tokentwin.dashboard.uploads import keep_document, kept_document
from tokentwin.dashboard.url import (
    amount,
    check_numbers,
    choose,
    choose_many,
    fresh_key,
    keep,
    named,
    number,
    pick,
    usual_first,
)
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES

_KEPT = "sweep-*.json"
_FORMS = {"form": "By form", "yaml": "In YAML"}
_SOURCES = {"preset": "Preset", "trace": "Trace"}
MODEL = "Llama-3.1-8B"
_GPUS, _RATES, _POLICIES = ("H100", "L40S"), ("2", "4", "8", "16"), ("vllm", "sarathi")
_COMMAND = "`tokentwin sweep FILE`, with `deployment.policy: [vllm, my_policy.py:MyPolicy]` under `grid` in the file"
_LIMITS = "Maximum number of requests in a step; the sweep simulates each. Without a number, vLLM's default."
_EXAMPLE = """\
base:
  deployment: {model: Llama-3.1-8B, device: cuda, gpu_memory_utilization: 0.9}
  gpu: H100
  workload:
    requests: 500
    arrivals: {kind: poisson, rate: 8}
    prompt: {kind: lognormal, mean: 900, sigma: 1.0, max: 7000}
    output: {kind: exponential, mean: 200, max: 1000}
  slo: {ttft_ms: 200, tpot_ms: 40}
grid:
  gpu: [H100, L40S]
  workload.arrivals.rate: [4, 8, 16]
"""


class NewSweep(NamedTuple):
    """A sweep as in its file, and the uploaded trace and policy that it names, if any."""

    data: dict[str, Any]
    trace: Path | None = None
    policy: str = ""


def sweep_inputs(runs: Path, own_policies: bool = False) -> NewSweep | Incomplete:
    """Draw the inputs, and return the sweep. Raises UserError for a value that no sweep can have.

    If `own_policies` is set, a user may upload a policy.
    """
    narrow, _ = st.columns([1, 2], gap="medium")
    with narrow:
        how = pick("Describe it", list(_FORMS), "how", _FORMS.__getitem__)
    if how == "yaml":
        return _from_text(runs)
    left, middle, right = st.columns(3, gap="medium")
    with left:
        model = choose("Model", usual_first(MODEL, models()), "model")
        names = choose_many("GPUs", sorted(gpus()), "gpus", _GPUS)
        sizes = choose_many("Tensor parallel", ["1", "2", "4", "8"], "tp", ["1"])
    with middle:
        varied, workload, trace = _traffic(runs)
    with right:
        policies = choose_many("Policies", [*POLICIES, OWN], "policies", _POLICIES, policies_title)
        own: str | Incomplete = ""
        if OWN in policies:
            own = policy_input(runs, "own", "policy file", own_policies, _COMMAND)
            policies = [str(own) if name == OWN else name for name in policies]
        limits = choose_many("max_num_seqs", ["64", "128", "256", "512"], "seqs", [], help=_LIMITS, more=True)
        ttft, tpot = st.columns(2)
        with ttft:
            first_ms = amount("TTFT within (ms)", "ttft_within", 0, 1e7, 1000, 100, help="0: no bound.")
        with tpot:
            next_ms = amount("TPOT within (ms)", "tpot_within", 0, 1e7, 50, 10, help="0: no bound.")
        seeds = None
        if trace is None and not isinstance(workload, Incomplete):
            seeds = number("Seeds", "seeds", 1, 20, 2, help="Runs of each combination with other random arrivals.")
    check_numbers()
    if isinstance(workload, Incomplete):
        return workload
    if isinstance(own, Incomplete):
        return own
    grid: dict[str, list[Any]] = {
        "gpu": names,
        "deployment.tensor_parallel_size": [int(size) for size in sizes],
        **varied,
        "deployment.policy": policies,
    }
    titles = {"gpu": "GPU", "deployment.policy": "policy", "deployment.tensor_parallel_size": "tensor-parallel size"}
    for path, values in grid.items():
        if not values:
            return Incomplete(f"Choose at least one {titles.get(path, path.rpartition('.')[2])}.")
    base: dict[str, Any] = {
        "deployment": {"model": model, "device": "cuda", "gpu_memory_utilization": 0.9},
        "gpu": names[0],
        "workload": workload,
    }
    if slo := {name: ms for name, ms in (("ttft_ms", first_ms), ("tpot_ms", next_ms)) if ms}:
        base["slo"] = slo
    if limits:
        grid["deployment.scheduler.max_num_seqs"] = _whole(limits)
    data = {"base": base, "grid": grid} | ({"seeds": seeds} if seeds else {})
    return NewSweep(data, trace, own)


def _traffic(runs: Path) -> tuple[dict[str, list[Any]], dict[str, Any] | Incomplete, Path | None]:
    """Draw the traffic, and return what varies in it, the workload, and the uploaded trace, if any."""
    if pick("Traffic", list(_SOURCES), "offered", _SOURCES.__getitem__) == "trace":
        path = trace_input(runs, "trace")
        limit = number("First requests", "limit", 1, 20_000, 1000, 100)
        factors = choose_many("Rate factors", ["0.5", "1", "2"], "factors", ["0.5", "1", "2"], more=True)
        if isinstance(path, Incomplete):
            return {}, path, None
        return {"workload.rate_scale": _positive("rate factor", factors)}, {"trace": str(path), "limit": limit}, path
    known = shapes()
    name = choose("Kind of requests", list(known), "preset", show=lambda name: known[name].title)
    rates = choose_many(
        "Requests/s", _RATES, "rates", _RATES, help="The sweep simulates each rate. You can type others.", more=True
    )
    requests = number("Requests per run", "requests", 50, 20_000, 500, 100)
    spec = known[name].model_dump(mode="json", include={"prompt", "output", "system_prompts"}, exclude_none=True)
    workload = {"requests": requests, "arrivals": {"kind": "poisson", "rate": 1.0}, **spec}
    return {"workload.arrivals.rate": _positive("rate", rates)}, workload, None


def _from_text(runs: Path) -> NewSweep | Incomplete:
    """Draw the text of a sweep's file, and return its content."""
    said = named("file") or ""
    text = st.text_area(
        "The sweep",
        height=260,
        max_chars=MOST_KB * 1000,
        key=fresh_key("sweep_text", "file"),
        placeholder=_EXAMPLE,
        help="As for `tokentwin sweep FILE`. It names no files: choose a trace or a policy file of your own by form.",
    )
    if text.strip():
        said = keep_document(runs, _KEPT, sweep_of(text))
    keep("file", said)
    data = kept_document(runs, _KEPT, said)
    if isinstance(data, dict):
        if not text.strip():
            st.json(data, expanded=1)
        return NewSweep(data)
    return Incomplete("The sweep of this link is not on this server. Please paste it." if said else "Type a sweep.")


def sweep_of(text: str) -> dict[str, Any]:
    """Return the sweep in a YAML text. Raises UserError if it is no mapping, or has values that JSON does not have."""
    data = parse_text(text, "sweep")
    try:
        json.dumps(data, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        remedy = f"has a value that is no text, number, list or mapping: {error}; write dates in quotes, and no .nan"
        raise UserError("sweep", "the text", remedy) from None
    return data


def _positive(what: str, texts: list[str]) -> list[float]:
    values = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            raise UserError(what, text, "is not a number") from None
        if not 0 < value <= 10_000:
            raise UserError(what, text, "must be above 0 and at most 10,000")
        values.append(value)
    return list(dict.fromkeys(values))


def _whole(texts: list[str]) -> list[int]:
    for text in texts:
        if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text)):
            raise UserError("max_num_seqs", text, "must be a whole number from 1 to 999,999")
    return list(dict.fromkeys(map(int, texts)))
