"""A plan's answer in words: the fleet in a sentence, why not one replica fewer, and if the traffic was long enough."""

from __future__ import annotations

from planning.plan.headline import percent
from planning.plan.objectives import Objective
from planning.plan.plan import Plan, Recommendation
from planning.plan.sensitivity import KEEPING_UP, Knee

FILLS = 3  # times the 99th percentile of E2E: shorter traffic does not fill a fleet


def answer(plan: Plan, risk_told: str | None) -> str:
    """The answer in a sentence; `risk_told` says what other appetites for risk would take."""
    best = plan.recommendation
    if best is None:
        return _none(plan)
    point, spares = best.offer.point, plan.limits.spares
    spare = f" ({point.replicas} and {count(spares, 'spare')})" if spares else ""
    risk = f"; {risk_told}" if risk_told else ""
    return (
        f"{count(point.replicas + spares, 'replica')} x {point.engine}{spare} = {count(point.gpus, 'GPU')}, "
        f"${point.usd_per_hour:,.2f}/h{risk}; {100 * point.attainment:.1f} % attainment, "
        f"{_headroom(best.knee)}; plausible {_plausible(plan, best)}{_elsewhere(best)}"
    )


def _none(plan: Plan) -> str:
    if not plan.failures:
        return "Infeasible: there is no candidate."
    first = plan.failures[0]
    told = f"{first.engine}: {first.reason}"
    if first.borderline:
        return f"Infeasible: no fleet surely meets the SLOs. Within the uncertainty of step times is {told}."
    return f"Infeasible: no fleet meets the SLOs. The closest is {told}."


def why_not_fewer(plan: Plan, best: Recommendation) -> str:
    """What breaks with one replica fewer, and by how much."""
    figures = best.fewer.decisive.figures if best.fewer else None
    if best.fewer is None or figures is None:
        return "a fleet has at least one replica"
    if best.fewer.met:
        return f"{count(best.fewer.replicas, 'replica')} would hold less probably, by more than the price is lower"
    objectives = plan.question.objectives
    broken = [
        f"{objective.text} ({objectives.seen(objective, value, figures.broken)})"
        for objective, value in zip(objectives.each, figures.observed, strict=True)
        if _breaks(objective, value)
    ]
    if not figures.steady.keeps_up:
        broken.append(f"{KEEPING_UP} ({figures.steady.piling_up_per_s:,.2g} more requests wait every second)")
    attained = f"attainment {100 * figures.attainment:.1f} %"
    late = f" in {100 * plan.question.risk:.0f} % of cases or more" if best.fewer.late else ""
    return f"{count(best.fewer.replicas, 'replica')} would break {' and '.join(broken)}{late}; {attained}"


def too_short(plan: Plan) -> str | None:
    """Said of traffic that ends before the recommended fleet is full; None of any other, or without one.

    A fleet that begins empty holds as many requests as it ever will once the longest of the first have been answered.
    """
    best = plan.recommendation
    if best is None or best.offer.trial.figures is None:
        return None
    longest_s, seconds = best.offer.trial.figures.e2e_p99_s, span_s(plan)
    if not seconds < FILLS * longest_s:
        return None
    return (
        f"the traffic is too short to fill the fleet: it lasts {seconds:,.3g} s, and answers up to {longest_s:,.3g} s "
        f"(E2E p99); over a longer time it may need more replicas. Give at least {FILLS * longest_s:,.3g} s of it"
    )


def span_s(plan: Plan) -> float:
    """From the first arrival to the last."""
    requests = list(plan.question.workload.requests)
    return (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9


def _headroom(knee: Knee) -> str:
    return f"{'' if knee.breaks else 'more than '}{knee.headroom_percent} % headroom"


def _plausible(plan: Plan, best: Recommendation) -> str:
    def gpus(replicas: int) -> int:
        return (replicas + plan.limits.spares) * best.offer.engine.gpus

    assert best.fast.replicas is not None
    low = gpus(best.fast.replicas)
    if best.slow.replicas is None:
        return f"{low} or more; at the slow end of the step times no such fleet meets the SLOs"
    high = gpus(best.slow.replicas)
    return f"{low}" if low == high else f"{low}-{high}"


def _elsewhere(best: Recommendation) -> str:
    """How probably it holds on other draws of the traffic."""
    if not best.held.draws:
        return ""
    told = " and ".join(percent(probability) for probability in best.held.draws)
    return f"; on {count(len(best.held.draws), 'other draw')} of the traffic the SLOs hold in {told} of cases"


def _breaks(objective: Objective, value: float) -> bool:
    return value < objective.share if objective.attainment else value > objective.bounds[0][1]


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
