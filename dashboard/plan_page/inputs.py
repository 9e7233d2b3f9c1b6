"""The Plan page's inputs, as widgets in the sidebar whose values live in the URL; together they are a `PlanRequest`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, get_args

import streamlit as st
from pydantic import BaseModel
from streamlit.delta_generator import DeltaGenerator

from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.dashboard.drafts_input import drafts_input
from tokentwin.dashboard.kept_inputs import Incomplete, deployment_input, model_input, trace_input
from tokentwin.dashboard.library import OWN_CALIBRATION, calibrations
from tokentwin.dashboard.own_policy import OWN, policies_title, policy_input
from tokentwin.dashboard.plan_page.slo_form import slo_form
from tokentwin.dashboard.shapes import TPOT_MS, Shape, shapes
from tokentwin.dashboard.url import (
    amount,
    check_numbers,
    choose,
    choose_many,
    fresh_key,
    keep,
    keep_all,
    named,
    named_all,
    number,
    pick,
    quantity,
    switch,
    text,
    typed_number,
    usual_first,
)
from tokentwin.planning.deployments import named_values
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.request import FleetRequest, PlanRequest
from tokentwin.planning.traffic import BUSIEST_S, WHOLE_S, Offered
from tokentwin.serving.answers.figures import shown_number
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES
from tokentwin.sim.router import ROUTERS
from tokentwin.traces.synth import SynthSpec

MODEL, GPUS, SIZES = "Llama-3.1-70B", ("H100", "H200"), ("2", "4")
SLOS = ("ttft_ms p99<=1000", "tpot_ms p99<=50")
_SLOS = (
    "One SLO on each line, as for `tokentwin plan --slo`. `ttft_ms p99<=500`: 99 % of the requests have a TTFT of at "
    "most 500 ms; `TTFT p99 < 0.5 s` is the same. `ttft_ms p99<=500 for chat` is about one SLO class. `tpot_ms<=50` "
    "with `attainment>=0.99`: 99 % of the requests meet all bounds that have no percentile. "
    "You can bound ttft_ms, tpot_ms, e2e_ms, queue_ms, prefill_ms and decode_ms."
)
RATE = 20.0
_PASTED = "a config.json of your own"
_SOURCES = {"preset": "Preset", "shape": "Shape", "trace": "Trace"}
_ARRIVALS = {"rate": "Rate", "users": "Users", "concurrency": "In flight"}
_ARRIVALS_HELP = (
    "Rate: requests arrive whether or not earlier ones are answered. Users: each reads an answer, then sends the next "
    "prompt. In flight: always the same number of requests; the end of one starts the next."
)
_BORNE = "0: the plan finds the number. Otherwise, the answer is how many users (or requests in flight) they bear."
_DEAREST = 1e6  # largest price in $/GPU-h
_LABELS = {
    "quantization": "Quantization",
    "kv_cache_dtype": "KV cache",
    "async_scheduling": "Async scheduling",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "policies": "policy",
    "splits": "split",
    "mix": "mixed fleet",
    "rank_by": "ranking",
    "router": "router",
    "calibration": "calibration",
    "max_replicas": "replica",
}
_FORMATS = {  # formats of weights and of KV: the URL's parameter, and the text of each value, the default first
    "quantization": (
        "quantization",
        {"none": "as published", "fp8": "FP8", "int4": "INT4"},
        "The plan tries each format. Most models are published in 16 bits. To convert them to FP8, vLLM first loads "
        "them in 16 bits, which needs more memory than a checkpoint in FP8. INT4 means a checkpoint in GPTQ or AWQ.",
    ),
    "kv_cache_dtype": (
        "kv",
        {"auto": "as activations", "fp8": "FP8"},
        "The plan tries each format. FP8 takes half the memory of 16 bits.",
    ),
}
_SWITCH = {"": "vLLM's default", "on": "on", "off": "off"}
_ASYNC = "With async scheduling, the engine plans step N + 1 while step N runs."
_LIMITS = {"max_num_seqs": ("seqs", 1_000_000, 16), "max_num_batched_tokens": ("batch_tokens", 100_000_000, 512)}
_VARIED = "pipeline_parallel_size=1,2; dtype=bfloat16,float16"
_MOST_TEXT = 1000  # maximum number of characters of all SLOs
_VARY = (
    "Values of other settings, as for `tokentwin plan --vary`. The plan tries every combination. Separate "
    "settings by semicolons."
)
_COMBINATIONS, _CANDIDATES = 64, 4096  # maximum numbers, typed and in all; the page estimates each while a user types
_TABLES = "kernel tables"
_TIMED = (
    "Kernel tables are measured times of each GPU's kernels. A calibration is measured on one engine; those in "
    "the runs directory are listed. A calibration of our own engine fixes the model."
)
_REST = {"": "vLLM's defaults", "yaml": "a deployment in YAML"}
_REST_HELP = "If the deployment states model, tensor-parallel size or policy, the page hides these inputs."
_NEEDED = {"gpus": "GPU", "tensor_parallel_sizes": "tensor-parallel size"}
_SPLITS = {"none": "none (every engine does both)", "search": "every ratio of up to five engines"} | {
    split: split for split in ("1:1", "1:2", "1:3", "2:1", "3:1")
}
_SPLIT = (
    "Ratios of prefill engines to decode engines in a replica; the plan tries each. With 1:2 a replica has one prefill "
    "engine and two decode engines. You can type other ratios, with encoders of images on a GPU of their own: 1e3 for "
    "three engines that do both, 1e1:2 for one and two."
)
_RANKS = {"price": "Price", "gpus": "Number of GPUs"}
_MIXES = {"none": "none", "search": "at half, 3/4 and 9/10 of the prompts"}
_MIX = (
    "Also tries fleets of two kinds of engines: one for prompts up to a length, one for longer prompts. You can type "
    "lengths in tokens."
)
_SPOT = "Price of a spot GPU in $/h; 0: none. The plan then tries it alone and beside GPUs on demand."
_HOLD = (
    "The probability with which all SLOs must hold, given the uncertainty of step times and the random traffic. With "
    "50 the plan takes predicted step times as exact."
)
_ENERGY = (
    "Estimates the power and the energy per token of the fleets that the answer shows, from the work of their steps. "
    "To try power limits, type `power_limit_w=400,700` in *Other values to try*."
)
_COMMAND = "`tokentwin plan TRACE --gpu H100 --slo 'ttft_ms p99<=1000' --policy vllm,my_policy.py:MyPolicy`"
_PRICE = re.compile(r"([^:,]+):(\d+(?:\.\d+)?)")


def plan_request() -> PlanRequest:
    """Return the request with which the Plan page opens."""
    return PlanRequest(
        model=MODEL,
        gpus=GPUS,
        tensor_parallel_sizes=tuple(map(int, SIZES)),
        traffic=next(iter(shapes().values())).traffic(RATE),
        slos=SLOS,
        window_s=WHOLE_S,
    )


def plan_inputs(runs: Path, own_policies: bool = False) -> PlanRequest | Incomplete:
    """Draw the inputs, and return the request: a `FleetRequest` if the number of replicas is given.

    If `own_policies` is set, a user may upload a policy.

    Raises UserError for inputs that can never be planned.
    """
    candidates, scheduling = st.container(), st.container()
    deployment = _deployment(runs)
    stated = deployment if isinstance(deployment, dict) else {}
    engine = st.expander("Engine")
    with st.expander("Fleet"):
        fleet, calibration, own_policy = _fleet(runs, stated, own_policies, scheduling)
    own = calibration is not None and (calibration / OWN_CALIBRATION).exists()
    with candidates:
        served = {} if own else _served(runs, stated)
    with engine:
        vary, more = _engine()
        drafts = None if own or "speculative" in (stated.get("scheduler") or {}) else drafts_input()
    above = st.container()
    slos = _slos()
    with above:
        traffic = _traffic(runs, _slowest_tpot_ms(slos))
    hold = amount("Must hold in (% of cases)", "hold", 50, 99, 90, 1, help=_HOLD)
    spares = number(
        "Spare replicas", "spares", 0, 100, 0, help="Number of replicas that you pay for, but that get no traffic."
    )
    prices = _own_price(calibration) if own and calibration else _prices(served["gpus"])
    spot = {} if own else _spot(served["gpus"])
    energy = {} if own else _energy()
    check_numbers()
    if isinstance(model := served.get("model"), Incomplete):
        return model
    if isinstance(traffic, Incomplete):
        return traffic
    if isinstance(deployment, Incomplete):
        return deployment
    if isinstance(own_policy, Incomplete):
        return own_policy
    needed = {label: served[name] for name, label in _NEEDED.items() if name in served} | {"SLO": slos}
    for what, there in (needed | {_LABELS[name]: values for name, values in (vary | fleet).items()}).items():
        if not there:
            return Incomplete(f"Choose at least one {what}.")
    vary |= _varied(more, vary)
    inputs = {
        **served,
        **fleet,
        **traffic,
        **energy,
        **spot,
        "prices": prices,
        "vary": vary or None,
        "slos": slos,
        "spares": spares,
    }
    inputs["risk"] = round(1 - hold / 100, 6)
    if drafts:
        scheduler = (deployment or {}).get("scheduler") or {}
        deployment = {**(deployment or {}), "scheduler": {**scheduler, "speculative": drafts}}
    inputs["deployment"] = _reading(deployment, traffic.get("traffic"))
    request = parse(FleetRequest if "replicas" in inputs else PlanRequest, inputs, where="plan")
    if request.combinations > _CANDIDATES:
        raise UserError("candidates", f"{request.combinations:,}", f"are too many; {_CANDIDATES:,} are allowed")
    return request


def _reading(deployment: dict[str, Any] | None, traffic: Any) -> dict[str, Any] | None:
    """Return `deployment` with `multimodal` and `lora` if requests of `traffic` need them, unless stated."""
    needed: dict[str, Any] = {}
    if isinstance(traffic, SynthSpec):
        needed |= {"multimodal": {}} if traffic.images else {}
        needed |= {"lora": _lora()} if traffic.adapters and "lora" not in (deployment or {}) else {}
    return {**needed, **(deployment or {})} if needed else deployment


def _lora() -> dict[str, int]:
    """Draw the settings of LoRA adapters, and return them."""
    slots, rank = st.columns(2)
    with slots:
        most = number("Adapter slots", "max_loras", 1, 10_000, 8, help="max_loras: adapters in one step of an engine.")
    with rank:
        highest = number("Highest rank", "max_lora_rank", 1, 512, 16, help="max_lora_rank: 8, 16, 32, 64, ...")
    check_numbers()
    return {"max_loras": most, "max_lora_rank": highest}


def _deployment(runs: Path) -> dict[str, Any] | Incomplete | None:
    """Draw the choice of a deployment for all other settings, and return it; None without one."""
    chosen = choose("Other settings", list(_REST), "rest", _REST.__getitem__, _REST_HELP)
    return deployment_input(runs, "yaml", "deployment") if chosen else None


def _served(runs: Path, stated: Collection[str]) -> dict[str, Any]:
    """Draw the model and the GPUs, and return the fields of the request that the deployment does not state.

    The model may be `Incomplete`.
    """
    served: dict[str, Any] = {} if "model" in stated else {"model": _model(runs)}
    names = sorted(gpus(), key=lambda name: (name not in GPUS, name))
    served["gpus"] = choose_many(
        "GPUs", names, "gpus", GPUS, help="The plan tries each GPU. `tokentwin gpus` lists prices."
    )
    if "tensor_parallel_size" not in stated:
        sizes = choose_many(
            "Tensor parallel",
            ["1", "2", "4", "8"],
            "tp",
            SIZES,
            help="Number of GPUs that share each layer.",
            more=True,
        )
        served["tensor_parallel_sizes"] = sizes
    return served


def _fleet(
    runs: Path, stated: Collection[str], own_policies: bool, scheduling: DeltaGenerator
) -> tuple[dict[str, Any], Path | None, str | Incomplete]:
    """Draw the settings of the fleet, its policies in `scheduling`, and return the changed fields of the request.

    Also return the calibration, if any, and the user's own policy, if any. Fields that the deployment states are left
    out.
    """
    fleet: dict[str, Any] = {}
    own: str | Incomplete = ""
    measured = calibrations(runs)
    timed = choose("Step times from", [_TABLES, *measured], "calibration", help=_TIMED)
    if timed in measured:
        fleet["calibration"] = str(measured[timed].resolve())
    if "policy" not in stated:
        with scheduling:
            policies = choose_many(
                "Policies", [*POLICIES, OWN], "policies", ["vllm"], policies_title, "The plan tries each policy."
            )
            if OWN in policies:
                own = policy_input(runs, "own", "policy file", own_policies, _COMMAND)
                policies = [str(own) if name == OWN else name for name in policies]
        if timed in measured or policies != ["vllm"]:
            fleet["policies"] = policies
    splits = choose_many(
        "Prefill to decode engines",
        list(_SPLITS),
        "splits",
        ["none"],
        lambda it: _SPLITS.get(it, it),
        _SPLIT,
        more=True,
    )
    if splits != ["none"]:
        fleet["splits"] = splits
    mix = choose_many("Mixed fleets", list(_MIXES), "mix", ["none"], lambda it: _MIXES.get(it, it), _MIX, more=True)
    if mix != ["none"]:
        fleet["mix"] = [length for length in mix if length != "none"]
    if choose("Rank by", ["price", "gpus"], "rank", _RANKS.__getitem__) == "gpus":
        fleet["rank_by"] = "gpus"
    usual = PlanRequest.model_fields
    router = choose("Router", usual_first(usual["router"].default, ROUTERS), "router")
    most = number(
        "Maximum replicas", "most", 1, 100_000, usual["max_replicas"].default, help="No larger fleet is tried."
    )
    for name, value in (("router", router), ("max_replicas", most)):
        if value != usual[name].default:
            fleet[name] = value
    return fleet, measured.get(timed), own


def _model(runs: Path) -> str | Incomplete:
    name = choose("Model", [*usual_first(MODEL, models()), _PASTED], "model")
    if name != _PASTED:
        return name
    pasted = model_input(runs)
    return pasted if isinstance(pasted, Incomplete) else str(pasted)


def _engine() -> tuple[dict[str, list[Any]], str]:
    """Draw settings of the engine, and return changed settings by the deployment's names, with the candidates' values.

    Other settings come as text, for `_varied`.
    """
    vary: dict[str, list[Any]] = {}
    for name, (parameter, shown, help) in _FORMATS.items():
        usual = [next(iter(shown))]
        chosen = choose_many(_LABELS[name], list(shown), parameter, usual, shown.__getitem__, help)
        if chosen != usual:
            vary[name] = [*chosen]
    overlapped = choose(_LABELS["async_scheduling"], list(_SWITCH), "async", _SWITCH.__getitem__, _ASYNC)
    if overlapped:
        vary["async_scheduling"] = [overlapped == "on"]
    for name, (parameter, most, step) in _LIMITS.items():
        about = SchedulerConfig.model_fields[name].description
        if limit := number(_LABELS[name], parameter, 0, most, 0, step, f"{about}; 0: vLLM's default."):
            vary[name] = [limit]
    return vary, text("Other values to try", "vary", placeholder=_VARIED, max_chars=500, help=_VARY)


def _varied(more: str, vary: Collection[str]) -> dict[str, list[Any]]:
    """Parse values of settings other than `vary`. Raises UserError for values that the page does not accept.

    A value must be a number or a word of the setting, because other text may name a file, or code.
    """
    varied = named_values("vary", [part.strip() for part in more.split(";") if part.strip()], many=True)
    for name, values in varied.items():
        if name in vary:
            raise UserError("vary", name, "is set above; clear one of the two")
        for value in values:
            word = isinstance(value, str) and (name.rpartition(".")[2], value) in _words(Deployment)
            if not word and not isinstance(value, bool | int | float):
                raise UserError("vary", f"{name}={value}", "is neither a number nor a valid value of the setting")
    if (combinations := prod(map(len, varied.values()))) > _COMBINATIONS:
        raise UserError("vary", f"{combinations:,} combinations", f"are too many; {_COMBINATIONS} are allowed")
    return varied


@cache
def _words(settings: type[BaseModel]) -> frozenset[tuple[str, str]]:
    """Return pairs of a setting and a word that it accepts, also of nested settings."""
    pairs: set[tuple[str, str]] = set()
    for name, field in settings.model_fields.items():
        for part in _parts(field.annotation):
            if isinstance(part, str):
                pairs.add((name, part))
            elif isinstance(part, type) and issubclass(part, BaseModel):
                pairs |= _words(part)
    return frozenset(pairs)


def _parts(annotation: Any) -> list[Any]:
    """Return the words and types in a type."""
    inside = get_args(annotation)
    return [part for argument in inside for part in _parts(argument)] if inside else [annotation]


def _slos() -> list[str]:
    """Draw the SLOs, and return each typed line once; `parse_objectives` checks them."""
    said = "\n".join(named_all("slo") or SLOS)[:_MOST_TEXT]
    typed: str = st.text_area("SLOs", said, 100, _MOST_TEXT, fresh_key("url_slo", "slo"), help=_SLOS)
    slos = list(dict.fromkeys(filter(None, (" ".join(line.split()) for line in typed.splitlines()))))
    keep_all("slo", slos, SLOS)
    with st.expander("SLOs by form"):
        slo_form(slos)
    return slos


def _slowest_tpot_ms(slos: Sequence[str]) -> float:
    """Return the loosest bound on TPOT among the SLOs of all requests; the default without one."""
    with suppress(UserError):
        return dict(parse_objectives(slos).bounds).get("tpot_ms", TPOT_MS)
    return TPOT_MS


def _traffic(runs: Path, tpot_ms: float) -> dict[str, Any] | Incomplete:
    """Draw the traffic, and return its fields of the request."""
    source = pick("Traffic", list(_SOURCES), "traffic", show=_SOURCES.__getitem__)
    if source == "trace":
        return _recorded(runs)
    how = pick("Arrivals", list(_ARRIVALS), "arrivals", _ARRIVALS.__getitem__, _ARRIVALS_HELP)
    shape = _preset() if source == "preset" else _shape(how)
    whole: dict[str, Any] = {"window_s": WHOLE_S}
    if how == "rate":
        return whole | {"traffic": shape.traffic(*_arrivals(), tpot_ms), "limit": _limit()}
    traffic = shape.awaited(**_clients(how))
    replicas = number("Replicas", "replicas", 0, 10_000, 0, help=_BORNE)
    return whole | {"traffic": traffic} | ({"replicas": replicas} if replicas else {})


def _preset() -> Shape:
    known = shapes()
    name = choose("Kind of requests", list(known), "preset", show=lambda name: known[name].title)
    st.caption(known[name].about)
    return known[name]


def _shape(how: str) -> Shape:
    prompt, spread = st.columns(2)
    with prompt:
        mean_in = amount("Prompt (tokens)", "prompt", 1, 1e6, 1000, 100, help="Mean length.")
        help = "Mean length. 0: pooling requests, for embeddings or scores; then bound e2e_ms."
        mean_out = amount("Output (tokens)", "output", 0, 1e5, 250, 50, help=help)
    with spread:
        help = "Standard deviation of the logarithm of the length. 0: all lengths are equal; 1: a long tail."
        sigma_in = amount("Spread", "prompt_sigma", 0, 3, 1, 0.1, help=help)
        sigma_out = amount("Spread ", "output_sigma", 0, 3, 0.8, 0.1, help=help)
    shared = number(
        "Shared prefix (tokens)", "prefix", 0, 1_000_000, 0, 100, help="All requests begin with this prefix."
    )
    images, adapters = _items()
    minutes = 0.0
    if how != "concurrency":
        enough = "0: long enough to fill a fleet with requests."
        minutes = amount("Minutes to simulate", "minutes", 0, 60, 0, 1, help=enough)
    outputs = {"kind": "lognormal", "mean": mean_out, "sigma": sigma_out, "max": int(30 * mean_out) + 1}
    return Shape(
        title="Shape",
        about="",
        minutes=minutes or None,
        # Lengths are clipped at about thirty times the mean, so that no single request decides the size of the fleet.
        prompt={"kind": "lognormal", "mean": mean_in, "sigma": sigma_in, "max": int(30 * mean_in) + 1},
        output=outputs if mean_out else {"kind": "none"},
        system_prompts={"count": 1, "tokens": shared} if shared else None,
        images=images,
        adapters=adapters,
    )


def _items() -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Draw images and LoRA adapters of requests, and return the fields of a shape; None without any."""
    images, tokens = st.columns(2)
    with images:
        help = "0: none. The encoder is the model's, or as multimodal in a deployment in YAML states."
        count = number("Images a request", "images", 0, 1000, 0, help=help)
    with tokens:
        help = "Placeholder tokens of an image: 2,040 for 1080p in Qwen3-VL, 400 for 640 x 640."
        of_each = number("Tokens an image", "image_tokens", 1, 1_000_000, 1000, 100, help=help) if count else 0
    adapters = number(
        "LoRA adapters", "adapters", 0, 100_000, 0, help="Adapters of requests, the k-th as often as 1/k."
    )
    drawn = {"count": count, "tokens": {"kind": "fixed", "tokens": of_each}} if count else None
    return drawn, {"count": adapters} if adapters else None


def _arrivals() -> tuple[float, float]:
    rate, cv = st.columns(2)
    with rate:
        at = amount("Peak req/s", "rate", 0.01, 10_000, RATE, 1, help="Requests per second in the busiest minutes.")
    with cv:
        help = "Coefficient of variation of the times between arrivals. 1: Poisson arrivals; above 1: bursts."
        burst = amount("Burstiness", "cv", 0.1, 10, 1, 0.5, help=help)
    return at, burst


def _clients(how: str) -> dict[str, Any]:
    """Draw the number of clients who wait for answers, and return the fields of `MadeUp`."""
    if how == "concurrency":
        return {"concurrency": number("Requests in flight", "concurrency", 1, 10_000, 64)}
    users, think = st.columns(2)
    with users:
        most = number("Users", "users", 1, 100_000, 500, 50)
    with think:
        help = "Mean time from an answer to the user's next prompt (exponential)."
        think_s = amount("Think time (s)", "think", 0.1, 1e4, 20, 5, help=help)
    return {"users": most, "think_s": think_s}


def _recorded(runs: Path) -> dict[str, Any] | Incomplete:
    path = trace_input(runs, "trace")
    if isinstance(path, Incomplete):
        return path
    limit = _limit()
    window = amount(
        "Busiest period (s)",
        "window",
        1,
        86_400,
        BUSIEST_S,
        60,
        help="The plan uses the period of this length with the most tokens.",
    )
    own, whole_s = _own_rate(str(path), window, limit)
    stretch = (
        f"the busiest {window:,.0f} s of {whole_s:,.0f} s" if window < whole_s else f"all {whole_s:,.0f} s of the trace"
    )
    st.caption(f"The plan uses {stretch}, at {shown_number(own)} requests/s. If you change the rate, bursts remain.")
    rate = amount("Peak req/s", "trace_rate", 0, 10_000, 0, 1, help="0: the trace's own rate.")
    return {"traffic": str(path), "window_s": window, "rate_scale": rate / own if rate else None, "limit": limit}


def _limit() -> int | None:
    return number("First requests", "limit", 0, 10**9, 0, 100, "Use only the first N requests; 0: all.") or None


@st.cache_data(max_entries=32, show_spinner=False)
def _own_rate(path: str, window_s: float, limit: int | None) -> tuple[float, float]:
    """Return the requests per second of the busiest period, and the seconds of the trace or of its first requests."""
    offered = Offered(traffic=path, limit=limit)
    whole = [request.arrival_ns for request in offered.workload().requests]
    busiest_of = offered.model_copy(update={"window_s": window_s})
    busiest = [request.arrival_ns for request in busiest_of.workload().requests]
    return (len(busiest) - 1) / ((busiest[-1] - busiest[0]) / 1e9), (whole[-1] - whole[0]) / 1e9


def _energy() -> dict[str, Any]:
    """Draw whether the answer has power and energy, and return the fields of the request."""
    with st.expander("Energy"):
        if not switch("Power and energy", "energy", _ENERGY):
            return {}
        pue = amount("PUE", "pue", 1, 10, 1, 0.05, help="1: the power of the GPUs alone.")
        grid = amount("Grid (gCO2/kWh)", "grid", 0, 10_000, 0, 10, help="0: no carbon.")
    return {"energy": True} | ({"pue": pue} if pue > 1 else {}) | ({"grid_gco2_per_kwh": grid} if grid else {})


def _spot(chosen: list[str]) -> dict[str, Any]:
    """Draw the prices of spot GPUs and their interruptions, and return the fields of the request."""
    usual = PlanRequest.model_fields
    with st.expander("Spot GPUs"):
        prices = {
            name: amount(f"{name} spot ($/h)", f"spot_{name}", 0, _DEAREST, 0, 0.1, help=_SPOT) for name in chosen
        }
        if not any(prices.values()):
            return {}
        help = "Mean number of interruptions of one spot replica in an hour."
        fields: dict[str, Any] = {
            "interruptions_per_hour": amount("Interruptions", "taken", 0, 3600, 0.1, 0.1, help=help)
        }
        for name, label, default in (("notice_s", "Notice (s)", 120), ("restart_s", "Restart (s)", 180)):
            help = str(usual[name].description)
            fields[name] = amount(label, name, 0, 1e6, default, 10, help=help[0].upper() + help[1:])
    return fields | {"spot": {name: usd for name, usd in prices.items() if usd}}


def _own_price(calibration: Path) -> dict[str, float]:
    """Draw the price of our own engine's device, which no catalogue holds, and return it."""
    device = json.loads(Calibration.load(calibration).deployment)["device"]
    return {device: amount(f"Price of the {device} ($/h)", "own_price", 0, _DEAREST, 1, 0.1)}


def _prices(chosen: list[str]) -> dict[str, float]:
    """Draw the prices, and return changed prices; `H100:2.9,H200:3.1` in the URL."""
    said = dict(_PRICE.findall(named("price") or ""))
    prices = {}
    with st.expander("Prices ($/GPU-h)"):
        for name in chosen:
            gpu, key = gpus()[name], fresh_key(f"url_price_{name}", "price")
            wanted = quantity(said.get(name), 0, _DEAREST, gpu.usd_per_hour)
            help = f"{gpu.price_source}, {gpu.price_as_of}"
            value = typed_number(f"{name} ($/h)", 0, _DEAREST, wanted, 0.1, key, help=help)
            if value != gpu.usd_per_hour:
                prices[name] = value
    keep("price", ",".join(f"{name}:{price:.10g}" for name, price in prices.items()))
    for name, price in prices.items():
        if not price:
            raise UserError("price", f"{name}: 0", "must be the price of a GPU-hour in dollars, above 0")
    return prices
