"""A plan for people: the sentence that answers, why not fewer, what else there is, and the command to serve it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from serving.errors import UserError
from tokentwin.planning.frontier import Point
from tokentwin.planning.objectives import Objective
from tokentwin.planning.plan import RUNNERS_UP, Offer, Plan, Recommendation
from tokentwin.planning.sensitivity import KEEPING_UP, Knee
from tokentwin.planning.trial import Figures
from tokentwin.planning.vllm_command import vllm_command

if TYPE_CHECKING:
    from rich.table import Table

    from serving.config import Deployment

FILLS = 3  # times the 99th percentile of E2E: shorter traffic does not fill a fleet
_COLUMNS = ("GPUs", "$/h", "tok/s\nper user", "tok/s\nper GPU", "$/Mtok\noutput", "attain-\nment", "SLOs\nmet")


def answer(plan: Plan) -> str:
    """The answer in a sentence."""
    best = plan.recommendation
    if best is None:
        if not plan.failures:
            return "Infeasible: there is no candidate."
        first = plan.failures[0]
        return f"Infeasible: no fleet meets the SLOs. Closest is {first.name}: {first.reason}."
    point, spares = best.offer.point, plan.limits.spares
    spare = f" ({point.replicas} and {_count(spares, 'spare')})" if spares else ""
    return (
        f"{_count(point.replicas + spares, 'replica')} x {point.engine}{spare} = {_count(point.gpus, 'GPU')}, "
        f"${point.usd_per_hour:,.2f}/h, {100 * point.attainment:.1f} % attainment, {_headroom(best.knee)}; "
        f"plausible {_plausible(plan, best)}"
    )


def why_not_fewer(plan: Plan, best: Recommendation) -> str:
    """What breaks with one replica fewer, and by how much."""
    if best.fewer is None or best.fewer.figures is None:
        return "one replica is the least there is"
    figures = best.fewer.figures
    objectives = plan.question.objectives
    broken = [
        f"{objective.text} ({objectives.seen(objective, value, figures.broken)})"
        for objective, value in zip(objectives.each, figures.observed, strict=True)
        if _breaks(objective, value)
    ]
    if not figures.steady.keeps_up:
        broken.append(f"{KEEPING_UP} ({figures.steady.piling_up_per_s:,.2g} more requests wait every second)")
    attained = f"attainment {100 * figures.attainment:.1f} %"
    return f"{_count(best.fewer.replicas, 'replica')} would break {' and '.join(broken)}; {attained}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything above and below, for scripts; infinities are null."""
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
            "vllm_serve": _command(best),
            "one_fewer": fewer and {**_seen(fewer, objectives), "attainment": fewer.attainment},
            "headroom_percent": best.knee.headroom_percent,
            "breaks_first": best.knee.breaks,
            "plausible_gpus": [
                end.replicas and (end.replicas + plan.limits.spares) * gpus for end in (best.fast, best.slow)
            ],
            "standing": {"mark": best.fast.standing, "reason": best.fast.reason},
        }
    return document


def print_plan(plan: Plan) -> None:
    """The whole report, on stdout."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(answer(plan), markup=False, style="bold")
    for line in _details(plan):
        console.print(line, markup=False)
    if plan.runners_up:
        console.print(_table("Runners-up", [(o.point, "") for o in plan.runners_up[:RUNNERS_UP]], plan.limits.spares))
    if plan.frontier:
        title = "Frontier: no simulated fleet beats these for users and per GPU, or per dollar"
        console.print(_table(title, _frontiers(plan), plan.limits.spares))
    if plan.recommendation is not None and (command := _command(plan.recommendation)):
        console.print(command, markup=False)


def _details(plan: Plan) -> Iterator[str]:
    best = plan.recommendation
    if short := too_short(plan):
        yield short
    yield f"traffic: {_traffic(plan)}"
    for objective in plan.question.objectives.each:
        if not objective.allowed(plan.question.requests):
            yield f"{objective.text}: of so few requests, not one may break it"
    if best is not None:
        figures = best.offer.trial.figures
        assert figures is not None
        objectives = plan.question.objectives
        seen = zip(objectives.each, figures.observed, strict=True)
        yield "observed: " + ", ".join(f"{o.text} ({objectives.seen(o, value, figures.broken)})" for o, value in seen)
        yield f"why not one fewer: {why_not_fewer(plan, best)}"
        if best.knee.breaks:
            yield f"beyond {best.knee.headroom_percent} % more rate, {best.knee.breaks} breaks first"
        yield f"step times: {best.fast.standing}: {best.fast.reason}"
    for name, usd in plan.dearer:
        yield f"dearer: {name}, at least ${usd:,.2f}/h"
    for failure in plan.failures if best is not None else plan.failures[1:]:
        yield f"will not do: {failure.name}: {failure.reason}"


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
        f"(E2E p99); the same traffic for longer may take more replicas. Give at least {FILLS * longest_s:,.3g} s of it"
    )


def _traffic(plan: Plan) -> str:
    requests = list(plan.question.workload.requests)
    seconds = span_s(plan)
    rate = f"{len(requests) / seconds:,.3g} a second" if seconds else "all at once"
    prompt = sum(request.prompt_len for request in requests) / len(requests)
    output = sum(request.output_len for request in requests) / len(requests)
    return (
        f"{_count(len(requests), 'request')} in {seconds:,.4g} s, {rate}; "
        f"{prompt:,.4g} prompt and {output:,.4g} output tokens on average"
    )


def span_s(plan: Plan) -> float:
    """From the first arrival to the last."""
    requests = list(plan.question.workload.requests)
    return (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9


def _frontiers(plan: Plan) -> list[tuple[Point, str]]:
    """The points of both frontiers, the fastest for users first, and which of them each is on."""
    points = dict.fromkeys(sorted((*plan.frontier, *plan.by_price), key=lambda p: -p.tok_s_user))
    on = (("GPU", plan.frontier), ("$", plan.by_price))
    return [(point, " ".join(name for name, frontier in on if point in frontier)) for point in points]


def _table(title: str, rows: Sequence[tuple[Point, str]], spares: int) -> Table:
    """Fleets, and on which frontier each is."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("fleet", overflow="fold")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    if any(on for _, on in rows):
        table.add_column("best\nper", no_wrap=True)
    for p, on in rows:
        figures = (p.usd_per_hour, p.tok_s_user, p.tok_s_gpu, p.usd_per_mtok_out)
        shown = [f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in figures]
        met = "yes" if p.met else "no"
        replicas = f"{p.replicas}+{spares}" if spares else str(p.replicas)
        cells = (f"{replicas} x {p.engine}", str(p.gpus), *shown, f"{100 * p.attainment:.1f} %", met, on)
        table.add_row(*cells[: len(table.columns)])
    return table


def _headroom(knee: Knee) -> str:
    return f"{'' if knee.breaks else 'more than '}{knee.headroom_percent} % headroom"


def _plausible(plan: Plan, best: Recommendation) -> str:
    def gpus(replicas: int) -> int:
        return (replicas + plan.limits.spares) * best.offer.engine.gpus

    assert best.fast.replicas is not None
    low = gpus(best.fast.replicas)
    if best.slow.replicas is None:
        return f"{low} or more; if steps take as long as they may, no fleet of it meets the SLOs"
    high = gpus(best.slow.replicas)
    return f"{low}" if low == high else f"{low}-{high}"


def _breaks(objective: Objective, value: float) -> bool:
    return value < objective.share if objective.attainment else value > objective.bounds[0][1]


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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _deployment(plan: Plan, offer: Offer) -> Deployment:
    """Of one replica; of a split one with the fleet, which it takes."""
    engine = offer.engine
    fleet = engine.fleet(offer.trial.replicas, plan.question.router) if engine.split else None
    return engine.deployment.model_copy(update={"fleet": fleet})


def _command(best: Recommendation) -> str | None:
    """None for what vLLM cannot serve, or not by one command."""
    if best.offer.engine.split:
        return None
    try:
        return vllm_command(best.offer.engine.deployment)
    except UserError:
        return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
