"""The Policy lab's inputs, as widgets whose values live in the URL; together they are a request for a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from tokentwin.dashboard.bundled import DEMO, PAIR, SAMPLES, bundled_pair, bundled_pair_on_vllm
from tokentwin.dashboard.drafts_input import drafts_input
from tokentwin.dashboard.kept_inputs import Incomplete, deployment_input, trace_input
from tokentwin.dashboard.library import calibrations, stamp
from tokentwin.dashboard.own_policy import OWN, TITLE, policy_input
from tokentwin.dashboard.planned import Planned
from tokentwin.dashboard.policy_lab_page.autoscaler_input import autoscaler_input
from tokentwin.dashboard.policy_lab_page.tasks import check_few_enough
from tokentwin.dashboard.shapes import mixes
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.url import amount, check_numbers, choose, number, pick, text, usual_first
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest, Side
from tokentwin.planning.deployments import named_value
from tokentwin.planning.plan.document import Recommendation
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.request import Timing
from tokentwin.planning.traffic import Offered
from tokentwin.serving.deployments.config import SchedulerConfig, parse
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import models
from tokentwin.serving.scheduler import POLICIES
from tokentwin.sim.router import ROUTERS

MODEL, GPU = "Llama-3.1-8B", "H100"
POLICY = {"a": "vllm", "b": "fair"}
RATE, SECONDS, SEEDS = 36.0, 30.0, 8
BOUNDS = {"ttft_ms": 1000.0, "tpot_ms": 100.0}
PASTED = "pasted"
PLANNED = "plan"  # an option of the traffic
_SOURCES = ("preset", "trace")
_PLAN_SEEDS = 5  # the fewest seeds with which intervals compare whole runs
_ALONE = "none (recordings only)"
_BUNDLED = "bundled calibration"
_NO_ENGINE = "none"
_ALSO = "A pair of recordings with the same requests that `compare --engine` made on another engine, such as vLLM."
_SEEDS = (
    "Number of runs of each side, each with other random arrivals. From five runs on, intervals come from the "
    "differences between runs, otherwise from those within a run."
)
_WIN = "A request counts as better or worse if its latency changes by at least this percentage."
_NUMBERS: dict[str, dict[str, tuple[float, float, float]]] = {  # settings of a policy: lowest, highest, step
    "sarathi": {"sarathi_token_budget": (0, 1_000_000, 64)},
    "sjf": {"sjf_error": (0.0, 10.0, 0.1)},
    "priority-ageing": {"ageing_s": (0.0, 1e9, 1.0)},
    "fair": {"fair_input_weight": (0, 1000, 1), "fair_output_weight": (0, 1000, 1)},
}
_LIMITS: dict[str, tuple[float, float, float]] = {
    "max_num_seqs": (1, 1_000_000, 16),
    "max_num_batched_tokens": (1, 100_000_000, 256),
}


def simulation_inputs(
    runs: Path, plan: Planned | None = None, own_policies: bool = False
) -> CompareRequest | Incomplete:
    """Draw the traffic, the source of step times, and the sides. Raises UserError for inputs that cannot be simulated.

    With a `plan` its traffic, its recommended fleet and its bounds can be chosen; they are then the defaults. A side
    may have a policy in an uploaded file if `own_policies` is set.
    """
    fleet = plan.answer.recommendation if plan else None
    with st.sidebar:
        source = pick("Traffic", [*_SOURCES, *([PLANNED] if fleet else [])], "offered", show=str.capitalize)
        if source != PLANNED:
            plan = fleet = None
        traffic: dict[str, Any] | Incomplete
        if plan:
            traffic = _of_plan(plan)
        elif source == "trace":
            traffic = _recorded(runs)
        else:
            traffic = _mixed()
        seeds = 1
        if not isinstance(traffic, Incomplete) and not isinstance(traffic["traffic"], str):
            seeds = number("Seeds", "seeds", 1, 50, _PLAN_SEEDS if plan else SEEDS, help=_SEEDS)
        timing = _timing_of(plan, fleet) if plan and fleet else _timing(runs)
        inputs: dict[str, Any] = {"seeds": seeds, "timing": timing, **_judged(plan.bounds if plan else BOUNDS)}
    for name, place in zip("ab", st.columns(2, gap="medium"), strict=True):
        with place:
            inputs[name] = _side(runs, name, fleet, own_policies)
    check_numbers()
    if isinstance(traffic, Incomplete):
        return traffic
    for side in "ab":
        if isinstance(inputs[side], Incomplete):
            return inputs[side]
    request = parse(CompareRequest, {**inputs, **traffic}, where="lab")
    check_few_enough(request, read=False)
    return request


def b_as_a(link: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return parameters that give side A the settings that side B has in `link`; an empty one is reset."""
    other = {f"a{name[1:]}": "" for name in link if name.startswith("a_")}
    mine = {f"a{name[1:]}": values for name, values in link.items() if name.startswith("b_")}
    return {**other, **mine, "a": link.get("b", POLICY["b"])}


def recording_inputs(runs: Path, own: Mapping[str, Path]) -> CompareRecordingsRequest:
    """Draw the choice of two recordings in `own`, or groups of them, and of step times to simulate the same runs.

    The bundled pair can be chosen, too; it is the default if `own` has fewer than two recordings.
    """
    recordings = {**own, **bundled_pair()}
    first, second = _likely(own if len(own) > 1 else bundled_pair())
    paths = []
    for name, place, likely in zip("ab", st.columns(2, gap="medium"), (first, second), strict=True):
        with place:
            chosen = choose(name.upper(), usual_first(likely, recordings), f"rec_{name}", lasting=False)
            paths.append(recordings[chosen])
    with st.sidebar:
        timing = _timing_beside(runs, all(_is_bundled(path) for path in paths))
        inputs = {"stamps": [_written(path) for path in paths], "timing": timing, **_judged()}
    check_numbers()
    a, b = (path.resolve() for path in paths)
    return parse(CompareRecordingsRequest, {"a": a, "b": b, **inputs}, where="lab")


def other_engine_input(own: Mapping[str, Path], first: CompareRecordingsRequest) -> CompareRecordingsRequest | None:
    """Draw the choice of a pair of recordings that another engine made of the same change as `first`.

    A pair is what `compare --engine` leaves in a directory: `a` and `b`.
    """
    sides = {**own, **bundled_pair(), **bundled_pair_on_vllm()}
    pairs = {name[:-2]: path.parent for name, path in sides.items() if name.endswith("/a") and f"{name[:-1]}b" in sides}
    others = {name: path for name, path in pairs.items() if path.resolve() != first.a.parent}
    usual = "bundled pair on vLLM" if first.a.parent == PAIR.resolve() else _NO_ENGINE
    chosen = choose("The same change on another engine", usual_first(usual, (_NO_ENGINE, *others)), "also", help=_ALSO)
    if chosen == _NO_ENGINE:
        return None
    a, b = (others[chosen].resolve() / side for side in "ab")
    stamps = (_written(a), _written(b))
    return first.model_copy(update={"a": a, "b": b, "stamps": stamps, "timing": None})


def _is_bundled(path: Path) -> bool:
    return path.is_relative_to(SAMPLES)


def _written(path: Path) -> int:
    """Return the time of the last write to a recording or a directory of them; 0 if it is bundled and never changes."""
    return 0 if _is_bundled(path) else max((stamp(at) for at in (path, *path.iterdir()) if at.is_dir()), default=0)


def _likely(recordings: Mapping[str, Path]) -> tuple[str, str]:
    """Return the newest pair that `compare --engine` left (OUT/a, OUT/b), else the two newest recordings."""
    for name in recordings:
        other = f"{name[:-1]}b"
        if name.endswith("/a") and other in recordings:
            return name, other
    names = list(recordings)
    return names[0], names[min(1, len(names) - 1)]


def _of_plan(plan: Planned) -> dict[str, Any]:
    """Return the traffic of the plan."""
    st.caption(literal(plan.traffic))
    return {name: plan.settings[name] for name in Offered.model_fields if name in plan.settings}


def _timing_of(plan: Planned, fleet: Recommendation) -> Timing:
    """Return the source of the step times of the planned fleet."""
    gpu = plan.answer.gpu_of(fleet)
    return Timing(calibration=plan.settings.get("calibration"), gpu=gpu if gpu in gpus() else None)


def _mixed() -> dict[str, Any]:
    """Draw a mix of bundled kinds of requests, and return its fields of the request."""
    known = mixes()
    name = choose("Kind", list(known), "mix", show=lambda name: known[name].title)
    st.caption(known[name].about)
    rate, length = st.columns(2)
    with rate:
        at = amount("Requests/s", "req_s", 0.01, 10_000, RATE, 1, help="Mean total rate of all kinds of requests.")
    with length:
        seconds = amount("Duration (s)", "seconds", 1, 86_400, SECONDS, 10, help="Requests arrive during this time.")
    return {"traffic": known[name].traffic(at, seconds)}


def _recorded(runs: Path) -> dict[str, Any] | Incomplete:
    path = trace_input(runs, "lab_trace")
    if isinstance(path, Incomplete):
        return path
    window = amount(
        "Busiest period (s)",
        "stretch",
        1,
        86_400,
        600,
        60,
        help="Only the period of this length with the most tokens is simulated.",
    )
    scale = amount("Rate factor", "rate_scale", 0.01, 100, 1, 0.1, help="The arrival rate is multiplied by this.")
    return {"traffic": str(path), "window_s": window, "rate_scale": scale}


def _timing(runs: Path) -> Timing:
    """Draw the choice of a GPU of the catalogue with a model, or of a calibration, which brings its deployment."""
    measured, cards = calibrations(runs), _cards()
    chosen = choose("Step times from", [*cards, *measured], "timing", help=_TIMING)
    if chosen in measured:
        return Timing(calibration=str(measured[chosen].resolve()))
    model = choose("Model", usual_first(MODEL, models()), "serving")
    shards = choose("Tensor parallel", ["1", "2", "4", "8"], "shards", help="Number of GPUs that share each layer.")
    return Timing(gpu=chosen, model=model, tensor_parallel_size=int(shards))


def _timing_beside(runs: Path, bundled: bool) -> Timing | None:
    """Draw the choice of step times to simulate recorded runs; for the `bundled` pair the default is bundled, too."""
    measured = {**calibrations(runs), **({_BUNDLED: DEMO / "calibration"} if bundled else {})}
    options = usual_first(_BUNDLED if bundled else _ALONE, (_ALONE, *measured, *_cards()))
    chosen = choose("Also simulate, with step times from", options, "beside", help=_TIMING)
    if chosen == _ALONE:
        return None
    if chosen in measured:
        return Timing(calibration=str(measured[chosen].resolve()))
    return Timing(gpu=chosen)


def _cards() -> list[str]:
    return usual_first(GPU, gpus())


def _judged(bounds: Mapping[str, float] = BOUNDS) -> dict[str, Any]:
    """Draw the bounds of attainment and the change that counts as a win, and return their fields of the request."""
    ttft, tpot = st.columns(2)
    said = {}
    for place, name in zip((ttft, tpot), BOUNDS, strict=True):
        usual = bounds.get(name, 0)
        short = name.removesuffix("_ms")
        with place:
            bound = amount(
                f"{short.upper()} within (ms)", f"{short}_within", 0, 1e7, usual, 10, help="The SLO; 0: no bound."
            )
        if bound:
            said[name] = bound
    usual = 100 * CompareRequest.model_fields["threshold"].default
    threshold = amount("Change that counts as a win (%)", "win", 0, 100, usual, 1, help=_WIN) / 100
    return {"bounds": said, "threshold": threshold}


def _side(runs: Path, side: str, fleet: Recommendation | None, own_policies: bool) -> Side | Incomplete:
    """Draw one side; with a planned `fleet` its settings are the defaults."""
    ordered = [*usual_first(POLICY[side], POLICIES), OWN, PASTED]
    chosen = choose(f"Policy {side.upper()}", ordered, side, show=lambda name: _TITLES.get(name, name), help=_POLICY)
    if chosen == PASTED:
        pasted = deployment_input(runs, f"{side}_yaml", f"deployment of {side.upper()}")
        return pasted if isinstance(pasted, Incomplete) else Side(deployment=pasted)
    policy: str | Incomplete = chosen
    if chosen == OWN:
        policy = policy_input(runs, f"{side}_own", f"policy file of {side.upper()}", own_policies, _COMMAND)
    if isinstance(policy, Incomplete):
        return policy
    settings: dict[str, Any] = {"policy": policy}
    planned = fleet.to_change() if fleet else None
    usual = planned.scheduler if planned else SchedulerConfig()
    with st.expander("Settings"):
        left, right = st.columns(2)
        for at, (name, ends) in enumerate({**_LIMITS, **_NUMBERS.get(chosen, {})}.items()):
            with (left, right)[at % 2]:
                value = _setting(side, name, getattr(usual, name), *ends)
            if value != getattr(usual, name):
                settings[name] = value
        if chosen == "edf":
            settings |= _deadlines(side)
        if drafts := drafts_input(f"{side}_"):
            settings["speculative"] = drafts
        if planned and planned.fleet:
            return Side(deployment=planned, settings=settings)  # the planned pools of prefill and decode engines stay
        if scaler := autoscaler_input(side):
            settings["fleet.autoscaler"] = scaler
        left, right = st.columns(2)
        with left:
            replicas = number("Replicas", f"{side}_replicas", 1, 1000, fleet.replicas if fleet else 1)
        with right:
            routers = usual_first(PlanRequest.model_fields["router"].default, ROUTERS) if fleet else list(ROUTERS)
            router = choose("Router", routers, f"{side}_router") if replicas > 1 or scaler else ""
    return Side(deployment=planned, settings=settings, replicas=None if replicas == 1 else replicas, router=router)


def _setting(side: str, name: str, usual: float | int, low: float, high: float, step: float) -> float | int:
    about = (SchedulerConfig.model_fields[name].description or "").removeprefix("fair: ")
    value = amount(name, f"{side}_{name}", low, high, usual, step, help=about)
    return int(value) if isinstance(usual, int) else value


def _deadlines(side: str) -> dict[str, Any]:
    """Draw the bounds of `edf`, such as `chat=300, batch=20000`, and return them."""
    said = text("TTFT bound by SLO class (ms)", f"{side}_deadlines", _DEADLINES, max_chars=500, help=f"`{_DEADLINES}`")
    bounds = dict(named_value("edf_ttft_ms", pair.strip()) for pair in said.split(",") if pair.strip())
    return {"edf_ttft_ms": bounds} if bounds else {}


_COMMAND = "`tokentwin compare --trace TRACE --gpu H100 --a policy=vllm --b policy=my_policy.py:MyPolicy`"
_TITLES = {OWN: TITLE, PASTED: "a deployment in YAML", "vllm": "vllm (as vLLM 0.33)"}
_DEADLINES = "chat=1000, batch=20000"
_POLICY = "The policy decides when each request is served. `docs/policies.md` describes all policies."
_TIMING = "Step times come from measured kernels of a GPU, or from a calibration in the runs directory."
