"""The answer to a plan: its `PlanDocument`, made from the search's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.curves import AROUND, LOAD, engine_curves, engines_work, fleet_curve, load_curve
from tokentwin.planning.plan.document import (
    Candidate,
    Choice,
    Choices,
    Fewer,
    Histogram,
    Lengths,
    Offered,
    PlanDocument,
    Recommendation,
    TrustSection,
)
from tokentwin.planning.plan.objectives import Objective
from tokentwin.planning.plan.offered_load import over_time
from tokentwin.planning.plan.omissions import Omissions
from tokentwin.planning.plan.plan import Offer, Plan, Robustness
from tokentwin.planning.plan.plan import Recommendation as Recommended
from tokentwin.planning.plan.sentences import answer, choices, near_ties, span_s, too_short, why_not_fewer
from tokentwin.planning.plan.trial import Figures
from tokentwin.planning.plan.vllm_command import vllm_command_of
from tokentwin.planning.traffic import clients_of, mean_rate
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.version import __version__

_BINS = 30


def plan_document(plan: Plan, engines: Sequence[Engine], inputs: Mapping[str, Any]) -> PlanDocument:
    """Return the document of `plan`, without the curves around the answer.

    `inputs` are the inputs that give the same plan: `{"command": ...}`, or the inputs of the page.
    """
    best, rate = plan.recommendation, _rate(plan)
    requests = list(plan.question.workload.requests)
    prompts, outputs = [r.prompt_len for r in requests], [r.output_len for r in requests]
    mean_tokens = (sum(prompts) + sum(outputs)) / len(requests)
    objectives = plan.question.objectives.slos
    recommendation = _recommendation(plan, best) if best else None
    by_risk = recommendation.choices if recommendation else None
    offers = tuple(Offered(**_offered(offer, objectives)) for offer in plan.runners_up)
    return PlanDocument(
        answer=answer(plan, recommendation.holds if recommendation else None, by_risk),
        risk_told=choices(by_risk) if by_risk else None,
        objectives=tuple(objective.text for objective in objectives),
        requests=plan.question.requests,
        span_s=span_s(plan),
        too_short=too_short(plan),
        risk=plan.question.risk,
        rank_by="gpus" if any(engine.counts_gpus for engine in engines) else "price",
        spares=plan.limits.spares,
        recommendation=recommendation,
        runners_up=offers,
        near_ties=tuple(near_ties(recommendation, offers, plan.limits.spares)) if recommendation else (),
        dearer=plan.dearer,
        infeasible=plan.failures,
        frontier=plan.frontier,
        frontier_by_price=plan.by_price,
        points=plan.points,
        trials=plan.trials,
        why_not_fewer=why_not_fewer(plan, best.robustness) if best and best.robustness else None,
        requests_per_s=rate,
        candidates={
            engine.name: Candidate(
                gpu=engine.gpu,
                deployment=engine.deployment.model_dump(mode="json"),
                kv_tokens=engine.kv_tokens,
                kv_requests=engine.kv_tokens / mean_tokens,
                defaults=engine.defaults,
            )
            for engine in engines
        },
        lengths=Lengths(prompt=length_histogram(prompts), output=length_histogram(outputs)),
        over_time=None if plan.question.loop else over_time(requests),
        by_replicas=(),
        by_rate=(),
        clients=clients_of(plan.question.loop) if plan.question.loop else None,
        mean_prompt_tokens=sum(prompts) / len(requests),
        mean_output_tokens=sum(outputs) / len(requests),
        seen_by="" if plan.question.front_door is None else plan.question.front_door.said,
        unforgiving=tuple(o.text for o in objectives if not o.allowed(plan.question.requests)),
        version=__version__,
        inputs=dict(inputs),
    )


def _rate(plan: Plan) -> float | None:
    """Return the mean requests per second; if clients wait for answers, of the recommended fleet; None if unknown."""
    if plan.question.loop is None:
        rate = mean_rate(plan.question.workload)
        return rate if math.isfinite(rate) else None
    figures = plan.recommendation.offer.trial.figures if plan.recommendation else None
    return figures.steady.requests_per_s if figures else None


def with_curves(
    document: PlanDocument,
    workers: Workers,
    plan: Plan,
    engines: Sequence[Engine],
    omissions: Omissions,
    expect: Callable[[str, float], None],
) -> PlanDocument:
    """Return `document` with the curves around the answer; those that fail are among the `omissions`.

    They show more and fewer replicas, more and less traffic, and the capacity of each engine. `expect` is called with
    each stage, and the approximate number of simulations left.
    """
    best = plan.recommendation
    if best is None:
        return document
    engine, replicas = best.offer.engine, best.offer.trial.replicas
    ruled_out = {failure.engine for failure in plan.failures}
    able = [engine for engine in engines if engine.name not in ruled_out]
    headroom = best.robustness.knee.headroom_percent if best.robustness else 0
    last = engines_work(len(able), workers.common.requests)

    def curve(stage: str, left: float, make: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
        expect(stage, left)
        return tuple(omissions.part(stage, make, ()))

    around = partial(fleet_curve, workers, engine, replicas, plan.limits.most)
    load = partial(load_curve, workers, engine, replicas, headroom)
    each = partial(engine_curves, workers, able, engine, replicas)
    curves = {
        "by_replicas": curve("attainment with more and fewer replicas", AROUND + LOAD + last, around),
        "by_rate": curve("latency with more and less traffic", LOAD + last, load),
        "engine_curves": curve("what each engine can do", last, each),
    }
    return document.model_copy(update=curves)


def length_histogram(tokens: Sequence[int]) -> Histogram:
    """Return a histogram of lengths: the percentage of the requests between each edge and the next.

    The edges are in tokens, and their logarithms are evenly spaced.
    """
    if not max(tokens):  # outputs of pooling requests
        return Histogram(edges=(0.0, 1.0), percent=(100.0,))
    edges = np.geomspace(max(min(tokens), 1), max(tokens) + 1, _BINS + 1)
    if not min(tokens):
        edges = np.concatenate([[0.0], edges])
    counts, _ = np.histogram(tokens, edges)
    return Histogram(
        edges=tuple(float(f"{edge:.6g}") for edge in edges), percent=tuple((100 * counts / len(tokens)).tolist())
    )


def _recommendation(plan: Plan, best: Recommended) -> Recommendation:
    objectives, figures = plan.question.objectives, best.offer.trial.figures
    assert figures is not None
    seen = zip(objectives.slos, figures.observed, strict=True)
    return Recommendation(
        **_offered(best.offer, objectives.slos),
        deployment=_deployment(plan, best.offer).model_dump(mode="json"),
        vllm_serve=vllm_command_of(best.offer.engine),
        **(_robust(plan, best, best.robustness) if best.robustness else {}),
        draws=best.probabilities.draws,
        trust=TrustSection(**figures.trust._asdict()),
        seen={objective.text: objectives.seen(objective, value, figures.broken) for objective, value in seen},
    )


def _robust(plan: Plan, best: Recommended, robust: Robustness) -> dict[str, Any]:
    """Return the fields of fewer replicas, more traffic, and faster and slower steps."""
    slos = plan.question.objectives.slos
    fewer, beside = robust.fewer.decisive.figures if robust.fewer else None, robust.fewer_point
    gpus, spares = best.offer.engine.gpus, plan.limits.spares
    fast = (robust.fast + spares) * gpus
    slow = robust.slow and (max(robust.slow, best.offer.trial.replicas) + spares) * gpus  # other draws may need more
    return {
        "one_fewer": Fewer(**_seen(fewer, slos), attainment=beside.attainment) if fewer and beside else None,
        "choices": _choices(plan, best, robust),
        "headroom_percent": robust.knee.headroom_percent,
        "headroom_band": robust.headroom,
        "breaks_first": robust.knee.breaks,
        "plausible_gpus": (fast, slow),
    }


def _choices(plan: Plan, best: Recommended, robust: Robustness) -> Choices | None:
    """Return the fleets for different risks; None if the error of step times is unknown."""
    if best.probabilities.planned is None:
        return None

    def choice(replicas: int) -> Choice:
        point, probabilities = robust.choices[replicas]
        engine, bought = best.offer.engine, replicas + plan.limits.spares
        bill = {"gpus": bought * engine.gpus, "usd_per_hour": bought * engine.usd_per_hour}
        return Choice(**dict(point), **bill, holds=probabilities.mean)

    return Choices(
        as_predicted=choice(robust.likely),
        recommended=choice(best.offer.trial.replicas),
        whole_interval=choice(robust.slow) if robust.slow else None,
    )


def _offered(offer: Offer, objectives: Sequence[Objective]) -> dict[str, Any]:
    assert offer.trial.figures is not None
    holds = offer.probabilities.mean if offer.probabilities else None
    return {**dict(offer.point), **_seen(offer.trial.figures, objectives), "holds": holds}


def _seen(figures: Figures, objectives: Sequence[Objective]) -> dict[str, Any]:
    observed = zip(objectives, figures.observed, strict=True)
    return {
        "observed": {objective.text: value for objective, value in observed},
        "e2e_p99_s": figures.e2e_p99_s,
        "piling_up_per_s": figures.steady.piling_up_per_s,
    }


def _deployment(plan: Plan, offer: Offer) -> Deployment:
    """Return the deployment of one replica; if the replica is split, the deployment includes the whole fleet."""
    engine = offer.engine
    fleet = engine.fleet(offer.trial.replicas, plan.question.router) if engine.split else None
    return engine.deployment.model_copy(update={"fleet": fleet})
