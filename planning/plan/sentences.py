"""A plan in words: the fleet and its risk, fleets that cost little more, why not one replica fewer, and a warning.

The command line, the Plan page and reports use the same words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokentwin.planning.plan.document import Choices, percent
from tokentwin.planning.plan.frontier import Point
from tokentwin.planning.plan.mixed_fleet import MixedFleet
from tokentwin.serving.answers.figures import counted, shown_change, shown_number, shown_share, shown_usd

if TYPE_CHECKING:
    from tokentwin.planning.plan.first_answer import FirstAnswer

from tokentwin.planning.plan.plan import Plan, Robustness
from tokentwin.planning.plan.sensitivity import KEEPING_UP

_NAMED = 3  # maximum number of engines that a first answer names
_NEAR = 0.25  # share of the answer's price by which a fleet that is shown beside it may cost more


def first_answer(answer: FirstAnswer | None) -> str:
    """Return in words the range in which the answer lies; `answer` is None if probably no fleet meets the SLOs."""
    if answer is None:
        return "From quick estimates: probably no fleet meets the SLOs, because every fleet that was tried breaks them"
    (few, many), (least, most) = answer.gpus, answer.usd_per_hour
    usd = " to ".join(dict.fromkeys(map(shown_usd, (least, most))))
    *named, last = answer.engines
    if len(named) >= _NAMED:
        named, last = named[: _NAMED - 1], f"{len(answer.engines) - _NAMED + 1} others"
    engines = " or ".join([", ".join(named), last] if named else [last])
    return f"From quick estimates: {f'{few:,} to ' if few < many else ''}{counted(many, 'GPU')}, {usd}/h, of {engines}"


def risk_of_mix(mix: MixedFleet) -> str:
    """Return a text like `The SLOs hold in 92 % of cases`."""
    return risk(mix.holds, None)


def risk(holds: float | None, by_risk: Choices | None) -> str:
    """Return a text like `The SLOs hold in 92 % of cases. If steps are slow, 97.0 % of the requests keep the SLOs`."""
    if holds is None:
        return "The probability that the SLOs hold is unknown."
    cases = f"The SLOs hold in {percent(holds)} of cases."
    if by_risk is None:
        return cases
    chosen, whole = by_risk.recommended, by_risk.whole_interval
    effects = [f"{chosen.broken_if_slow} would break"] if chosen.broken_if_slow else []
    if chosen.if_slow < 1 or not effects:  # a mean may break although no request is beyond a bound of its own
        effects.append(f"{shown_share(chosen.if_slow, 1)} of the requests keep the SLOs")
    slow = f"If steps are slow, {': '.join(effects)}"
    if whole is None:
        slow += ", and no number of GPUs holds them"
    elif whole.replicas <= chosen.replicas:
        slow = "They hold even if steps are slow"
    return f"{cases} {slow}."


def choices(by_risk: Choices) -> str:
    """Return the GPUs for more and for less risk: `12 GPUs would be enough if steps were as predicted`."""
    likely, chosen, whole = by_risk.as_predicted, by_risk.recommended, by_risk.whole_interval
    fewer = counted(likely.gpus, "GPU") if likely.gpus < chosen.gpus else "No fewer"
    text = f"{fewer} would be enough if steps were as predicted"
    if whole and whole.gpus > chosen.gpus:
        text += f", and {whole.gpus:,} for the complete 90 % interval of step times"
    return f"{text}."


def near_ties(best: Point, others: Sequence[Point], spares: int) -> Iterator[str]:
    """Yield the fleets that cost little more: `1 x TP4 B200: +11 % cost, half the GPUs, 75 instead of 50 ...`."""
    for other in others:
        if other.usd_per_hour <= (1 + _NEAR) * best.usd_per_hour:
            replicas = f"{other.replicas}+{spares}" if spares else f"{other.replicas}"
            yield f"{replicas} x {other.engine}: {', '.join(_compared(other, best))}"


def _compared(other: Point, best: Point) -> Iterator[str]:
    if best.usd_per_hour:
        change = 100 * (other.usd_per_hour / best.usd_per_hour - 1)
        yield "the same cost" if abs(change) < 0.5 else f"{shown_change(change, 0)} cost"
    ratios = {1.0: "as many GPUs", 0.5: "half the GPUs", 2.0: "twice the GPUs"}
    yield ratios.get(other.gpus / best.gpus) or f"{other.gpus:,} instead of {counted(best.gpus, 'GPU')}"
    if other.tok_s_user is not None and best.tok_s_user is not None:
        yield f"{shown_number(other.tok_s_user)} instead of {shown_number(best.tok_s_user)} tok/s per user"


FILLS = 3  # factor over the 99th percentile of E2E; shorter traffic does not fill a fleet


def answer(plan: Plan, holds: float | None, choices: Choices | None) -> str:
    """Return the fleet and its risk, in short sentences; `choices` are the fleets for other risks, None if unknown."""
    best = plan.recommendation
    if best is None:
        return _none(plan)
    point, spares = best.offer.point, plan.limits.spares
    spare = f" ({point.replicas} and {counted(spares, 'spare')})" if spares else ""
    return (
        f"{counted(point.replicas + spares, 'replica')} x {point.engine}{spare} = {counted(point.gpus, 'GPU')}, "
        f"{shown_usd(point.usd_per_hour)}/h. {risk(holds, choices)}"
    )


def _none(plan: Plan) -> str:
    if not plan.failures:
        return "Infeasible: there is no candidate."
    first = plan.failures[0]
    closest = f"{first.engine}: {first.reason}"
    if first.borderline:
        return f"Infeasible: no fleet certainly meets the SLOs. Within the uncertainty of step times is {closest}."
    return f"Infeasible: no fleet meets the SLOs. The closest is {closest}."


def why_not_fewer(plan: Plan, robust: Robustness) -> str:
    """Return the objectives that break with one replica fewer, and their observed values."""
    figures = robust.fewer.decisive.figures if robust.fewer else None
    if robust.fewer is None or robust.fewer_point is None or figures is None:
        return "a fleet has at least one replica"
    if robust.fewer.met:
        fewer = counted(robust.fewer.replicas, "replica")
        return f"{fewer} would meet the SLOs less probably, which outweighs the lower price"
    broken = plan.question.objectives.seen_broken(figures.observed, figures.broken)
    if not figures.steady.keeps_up:
        broken.append(f"{KEEPING_UP} ({shown_number(figures.steady.piling_up_per_s)} more requests wait every second)")
    late = f" in {shown_share(plan.question.risk)} of cases or more" if robust.fewer.late else ""
    breaks = f"{counted(robust.fewer.replicas, 'replica')} would break {' and '.join(broken)}{late}"
    return f"{breaks}; attainment {robust.fewer_point.attained}"


def too_short(plan: Plan) -> str | None:
    """Return a warning if the traffic ends before the recommended fleet is full; otherwise None.

    A fleet begins empty. It is full when the longest of the first requests have been answered.
    """
    best = plan.recommendation
    if best is None or best.offer.trial.figures is None:
        return None
    longest_s, seconds = best.offer.trial.figures.e2e_p99_s, span_s(plan)
    if not 0 < seconds < FILLS * longest_s:  # 0: a closed loop, whose clients begin at once
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
