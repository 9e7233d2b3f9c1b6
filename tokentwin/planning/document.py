"""A plan as it is saved: the answer, and what surrounds it, as one JSON document.

It is what `tokentwin plan --format json` prints, what a job of the Plan page keeps, and what `tokentwin export` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from serving.config import Deployment
from serving.workload import Workload
from tokentwin import __version__
from tokentwin.planning.answer import answer, span_s, too_short, why_not_fewer
from tokentwin.planning.curves import fleet_curve, load_curve, mean_rate
from tokentwin.planning.engines import Engine
from tokentwin.planning.frontier import Point
from tokentwin.planning.objectives import Objective
from tokentwin.planning.plan import Offer, Plan, Recommendation
from tokentwin.planning.trial import Figures
from tokentwin.planning.vllm_command import vllm_command_of
from tokentwin.planning.workers import Workers
from tokentwin.progress import Tell, untold

_BINS = 30
_AROUND = 0.7  # of the work of both curves, the first one's: it is simulated at both ends of the interval, too


def plan_document(
    workers: Workers,
    found: Plan,
    engines: Sequence[Engine],
    asked: Mapping[str, Any],
    tell: Tell = untold,
) -> dict[str, Any]:
    """`as_json`, and

    why_not_fewer   in a sentence
    requests_per_s  the mean rate; None if all arrive at once
    candidates      of each, by its name: the GPU, the deployment, and the tokens and the requests of mean length that
                    one engine has room for in KV memory
    lengths         how long prompts and outputs are; see `length_histogram`
    by_replicas     attainment of the recommended engine with more and fewer replicas
    by_rate         latencies of the recommended fleet with more and less traffic
    version, asked  what tells how to get it again: `asked` is `{"command": ...}`, or the inputs of the page

    The two curves are simulated here: `tell` hears of them, with the share of this that is done.
    """
    best, rate = found.recommendation, mean_rate(found.question)
    requests = list(found.question.workload.requests)
    mean_tokens = sum(request.prompt_len + request.output_len for request in requests) / len(requests)
    return {
        **as_json(found),
        "why_not_fewer": why_not_fewer(found, best) if best else None,
        "requests_per_s": rate if math.isfinite(rate) else None,
        "candidates": {
            engine.name: {
                "gpu": engine.gpu,
                "deployment": engine.deployment.model_dump(mode="json"),
                "kv_tokens": engine.kv_tokens,
                "kv_requests": engine.kv_tokens / mean_tokens,
            }
            for engine in engines
        },
        "lengths": workload_lengths(found.question.workload),
        **(_curves(workers, best, found.limits.most, tell) if best else {"by_replicas": [], "by_rate": []}),
        "version": __version__,
        "asked": dict(asked),
    }


def _curves(workers: Workers, best: Recommendation, most: int, tell: Tell) -> dict[str, Any]:
    """What more and fewer replicas, up to `most`, and more and less traffic would do."""
    engine, replicas = best.offer.engine, best.offer.trial.replicas

    def told_around(share: float) -> None:
        tell("attainment with more and fewer replicas", _AROUND * share)

    def told_load(share: float) -> None:
        tell("latency with more and less traffic", _AROUND + (1 - _AROUND) * share)

    around = fleet_curve(workers, engine, replicas, most, told_around)
    load = load_curve(workers, engine, replicas, best.knee.headroom_percent, told_load)
    return {
        "by_replicas": [asdict(point) for point in around],
        "by_rate": [{name: _finite(value) for name, value in asdict(point).items()} for point in load],
    }


def workload_lengths(workload: Workload) -> dict[str, dict[str, list[float]]]:
    """`length_histogram` of the prompts and of the outputs."""
    requests = list(workload.requests)
    return {
        "prompt": length_histogram([request.prompt_len for request in requests]),
        "output": length_histogram([request.output_len for request in requests]),
    }


def length_histogram(tokens: Sequence[int]) -> dict[str, list[float]]:
    """The percentage of the requests between each of the `edges` (tokens, evenly spaced logarithms) and the next."""
    import numpy as np

    edges = np.geomspace(min(tokens), max(tokens) + 1, _BINS + 1)
    counts, _ = np.histogram(tokens, edges)
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "percent": (100 * counts / len(tokens)).tolist()}


def as_json(plan: Plan) -> dict[str, Any]:
    """The answer, what stands behind it and what lost, for scripts; infinities are null."""
    best = plan.recommendation
    objectives = plan.question.objectives.each
    document: dict[str, Any] = {
        "feasible": best is not None,
        "answer": answer(plan),
        "objectives": [objective.text for objective in objectives],
        "requests": plan.question.requests,
        "span_s": span_s(plan),
        "too_short": too_short(plan),
        "spares": plan.limits.spares,
        "recommendation": None,
        "runners_up": [_offered(offer, objectives) for offer in plan.runners_up],
        "dearer": [{"engine": name, "usd_per_hour_at_least": usd} for name, usd in plan.dearer],
        "infeasible": [{"engine": failure.name, "reason": failure.reason} for failure in plan.failures],
        "frontier": [_point(point) for point in plan.frontier],
        "frontier_by_price": [_point(point) for point in plan.by_price],
        "points": [_point(point) for point in plan.points],
        "trials": plan.trials,
    }
    if best is not None:
        fewer = best.fewer.figures if best.fewer else None
        gpus = best.offer.engine.gpus
        document["recommendation"] = {
            **_offered(best.offer, objectives),
            "deployment": _deployment(plan, best.offer).model_dump(mode="json"),
            "vllm_serve": vllm_command_of(best.offer.engine),
            "one_fewer": fewer and {**_seen(fewer, objectives), "attainment": fewer.attainment},
            "headroom_percent": best.knee.headroom_percent,
            "breaks_first": best.knee.breaks,
            "plausible_gpus": [
                end.replicas and (end.replicas + plan.limits.spares) * gpus for end in (best.fast, best.slow)
            ],
            "other_draws": {"drawn": len(best.draws), "met": sum(best.draws)},
            "standing": {"mark": best.fast.standing, "reason": best.fast.reason},
        }
    return document


def _offered(offer: Offer, objectives: Sequence[Objective]) -> dict[str, Any]:
    assert offer.trial.figures is not None
    return {**_point(offer.point), **_seen(offer.trial.figures, objectives)}


def _seen(figures: Figures, objectives: Sequence[Objective]) -> dict[str, Any]:
    observed = zip(objectives, figures.observed, strict=True)
    return {
        "observed": {objective.text: _finite(value) for objective, value in observed},
        "e2e_p99_s": _finite(figures.e2e_p99_s),
        "piling_up_per_s": figures.steady.piling_up_per_s,
    }


def _point(point: Point) -> dict[str, Any]:
    return {name: _finite(getattr(point, name)) for name in Point.__dataclass_fields__}


def _deployment(plan: Plan, offer: Offer) -> Deployment:
    """Of one replica; of a split one with the fleet, which it takes."""
    engine = offer.engine
    fleet = engine.fleet(offer.trial.replicas, plan.question.router) if engine.split else None
    return engine.deployment.model_copy(update={"fleet": fleet})


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
