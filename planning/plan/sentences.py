"""A plan's answer in words: the fleet and its risk, the reason against one replica fewer, and a warning."""

from __future__ import annotations

from planning.plan.document import Choices
from planning.plan.headline import risk
from planning.plan.objectives import Objective
from planning.plan.plan import Plan, Recommendation
from planning.plan.sensitivity import KEEPING_UP
from serving.figures import counted, shown_number, shown_share, shown_usd

FILLS = 3  # factor over the 99th percentile of E2E; shorter traffic does not fill a fleet


def answer(plan: Plan, choices: Choices | None) -> str:
    """Return the fleet and its risk, in short sentences; `choices` are the fleets for other risks."""
    best = plan.recommendation
    if best is None:
        return _none(plan)
    point, spares = best.offer.point, plan.limits.spares
    spare = f" ({point.replicas} and {counted(spares, 'spare')})" if spares else ""
    return (
        f"{counted(point.replicas + spares, 'replica')} x {point.engine}{spare} = {counted(point.gpus, 'GPU')}, "
        f"{shown_usd(point.usd_per_hour)}/h. {risk(choices)}"
    )


def _none(plan: Plan) -> str:
    if not plan.failures:
        return "Infeasible: there is no candidate."
    first = plan.failures[0]
    closest = f"{first.engine}: {first.reason}"
    if first.borderline:
        return f"Infeasible: no fleet certainly meets the SLOs. Within the uncertainty of step times is {closest}."
    return f"Infeasible: no fleet meets the SLOs. The closest is {closest}."


def why_not_fewer(plan: Plan, best: Recommendation) -> str:
    """Return the objectives that break with one replica fewer, and their observed values."""
    figures = best.fewer.decisive.figures if best.fewer else None
    if best.fewer is None or figures is None:
        return "a fleet has at least one replica"
    if best.fewer.met:
        fewer = counted(best.fewer.replicas, "replica")
        return f"{fewer} would meet the SLOs less probably, which outweighs the lower price"
    objectives = plan.question.objectives
    broken = [
        f"{objective.text} ({objectives.seen(objective, value, figures.broken)})"
        for objective, value in zip(objectives.slos, figures.observed, strict=True)
        if _breaks(objective, value)
    ]
    if not figures.steady.keeps_up:
        broken.append(f"{KEEPING_UP} ({shown_number(figures.steady.piling_up_per_s)} more requests wait every second)")
    attained = f"attainment {shown_share(figures.attainment, 1)}"
    late = f" in {shown_share(plan.question.risk)} of cases or more" if best.fewer.late else ""
    return f"{counted(best.fewer.replicas, 'replica')} would break {' and '.join(broken)}{late}; {attained}"


def too_short(plan: Plan) -> str | None:
    """Return a warning if the traffic ends before the recommended fleet is full; otherwise None.

    A fleet begins empty. It is full when the longest of the first requests have been answered.
    """
    best = plan.recommendation
    if best is None or best.offer.trial.figures is None:
        return None
    longest_s, seconds = best.offer.trial.figures.e2e_p99_s, span_s(plan)
    if not seconds < FILLS * longest_s:
        return None
    lasts, longest, enough = map(shown_number, (seconds, longest_s, FILLS * longest_s))
    return (
        f"the traffic is too short to fill the fleet: it lasts {lasts} s, and answers take up to {longest} s (E2E p99)"
        f". Longer traffic may need more replicas. Give at least {enough} s of traffic"
    )


def span_s(plan: Plan) -> float:
    """Return the seconds from the first arrival to the last."""
    requests = list(plan.question.workload.requests)
    return (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9


def _breaks(objective: Objective, value: float) -> bool:
    return value < objective.share if objective.attainment else value > objective.bounds[0][1]
