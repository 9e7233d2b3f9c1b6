"""Mixed fleets in the answer of a plan, and how the best of them compares with the best fleet of a single kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import Offered, PlanDocument, percent
from tokentwin.planning.plan.mixed_fleet import MixedFleet, MixedPool
from tokentwin.planning.plan.mixes import SizedMix, lengths_to_try, mixes, settings_of
from tokentwin.planning.plan.plan import Plan
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.sentences import risk_of_mix
from tokentwin.planning.plan.spot import Spot, SpotFleet, spot_fleets
from tokentwin.planning.plan.trial import Figures, Question
from tokentwin.planning.workers import Workers
from tokentwin.serving.answers.figures import counted, shown_change, shown_share, shown_usd


def with_mixed_fleets(
    document: PlanDocument, workers: Workers[Question], plan: Plan, engines: Sequence[Engine], request: PlanRequest
) -> PlanDocument:
    """Return `document` with the mixed fleets of `request`, if it asks for any, and an answer that compares them."""
    if not request.asks_mixed_fleets:
        return document
    question, limits, best = plan.question, plan.limits, document.recommendation
    dearest = best.usd_per_hour if best else None
    mixed: list[MixedFleet] = []
    if request.mix is not None:
        lengths = lengths_to_try(request.mix, question)
        offer = plan.recommendation.offer if plan.recommendation else None
        single = (offer.engine, offer.trial.replicas) if offer else None
        sized = mixes(workers, engines, lengths, limits.most, single)
        mixed += [_of_kinds(one, question, limits.spares, dearest) for one in sized]
    if request.spot:
        said = {name: getattr(request, name) for name in ("notice_s", "restart_s")}
        times = {name: seconds for name, seconds in said.items() if seconds is not None}
        spot = Spot(request.spot, request.interruptions_per_hour or 0.0, **times)
        offers = [plan.recommendation.offer, *plan.runners_up] if plan.recommendation else []
        fewest = [(offer.engine, offer.trial.replicas) for offer in offers]
        fleets = spot_fleets(workers, fewest, spot, limits.most, limits.spares)
        mixed += [_of_spot(one, question, spot, limits.spares, dearest) for one in fleets]
    worth = partial(_worth, by_gpus=request.rank_by == "gpus")
    mixed.sort(key=lambda mix: (not mix.met, -worth(mix), mix.usd_per_hour, mix.gpus))
    first = mixed[0] if mixed else None
    wins = first is not None and first.met and (best is None or worth(first) > worth(best))
    changes: dict[str, Any] = {"mixes": tuple(mixed), "mixed": " ".join(_compared(first, wins))}
    if first is not None and wins:
        bill = f"{counted(first.gpus, 'GPU')}, {shown_usd(first.usd_per_hour)}/h"
        cases = f" {risk_of_mix(first)}"
        alone = f" The best single kind: {document.answer}" if best else ""
        changes["answer"] = f"{first.name} = {bill}.{cases}{alone}"
    return document.model_copy(update=changes)


def _worth(fleet: MixedFleet | Offered, by_gpus: bool) -> float:
    """Return the probability that every SLO holds, per dollar or per GPU; if unknown, it counts as 1."""
    holds = 1.0 if fleet.holds is None else fleet.holds
    return holds / max(fleet.gpus if by_gpus else fleet.usd_per_hour, 1e-9)


def _compared(first: MixedFleet | None, wins: bool) -> Iterator[str]:
    """Yield how the best mixed fleet compares with the best fleet of a single kind."""
    if first is None:
        yield (
            "No mixed fleet of those that were tried, up to 1.5 times the price of the best single kind, keeps the "
            "SLOs with the accepted risk."
        )
        return
    if not first.met:
        at_best = "" if first.holds is None else f": {first.name} does so in {percent(first.holds)} of cases"
        yield f"No mixed fleet keeps the SLOs with the accepted risk{at_best}."
        return
    if first.change is not None:
        more = shown_change(100 * first.change, 0)
        less = (
            ""
            if wins or first.change >= 0 or first.holds is None
            else (f", but its SLOs hold in only {percent(first.holds)} of cases, so it is worth less")
        )
        yield f"The best mix, {first.name}, costs {more} against the best single kind on demand{less}."
    if first.interruptions is not None:
        gone = shown_share(first.without_spot or 0.0, 1)
        yield (
            "Interruptions are assumed to be independent; if all spot GPUs go at once, "
            f"{gone} of the requests keep the SLOs."
        )


def _of_kinds(sized: SizedMix, question: Question, spares: int, dearest: float | None) -> MixedFleet:
    pools = tuple(
        _pool(pool.engine, pool.replicas, spares, {"max_prompt_tokens": pool.max_prompt_tokens})
        for pool in sized.mix.pools
    )
    figures = sized.trial.figures
    assert figures is not None
    holds = sized.probabilities.mean
    deployment = sized.mix.deployment(question.router)
    return MixedFleet(**_common(pools, dearest, figures, question), holds=holds, met=True, deployment=deployment)


def _of_spot(one: SpotFleet, question: Question, spot: Spot, spares: int, dearest: float | None) -> MixedFleet:
    engine, pools = one.engine, []
    if one.on_demand or spares:
        pools.append(_pool(engine, one.on_demand, spares))
    usd = one.spot * engine.gpus * spot.usd_per_gpu_hour[engine.gpu]
    pools.append(_pool(engine, one.spot, 0, {"spot": True, "usd_per_hour": usd}))
    fleet = one.fleet(question.router, spot).model_dump(mode="json", exclude_defaults=True)
    return MixedFleet(
        **_common(tuple(pools), dearest, one.figures, question),
        holds=one.holds if one.known else None,
        met=one.holds >= 1 - question.risk - 1e-9,
        interruptions=one.interruptions,
        if_interrupted=one.if_interrupted,
        without_spot=one.without_spot,
        deployment={**settings_of(engine), "fleet": fleet},
    )


def _pool(engine: Engine, replicas: int, spares: int, more: dict[str, Any] | None = None) -> MixedPool:
    bought = replicas + spares
    bill = {"gpus": bought * engine.gpus, "usd_per_hour": bought * engine.usd_per_hour}
    return MixedPool(**{"engine": engine.name, "replicas": replicas, **bill, **(more or {})})


def _common(
    pools: tuple[MixedPool, ...], dearest: float | None, figures: Figures, question: Question
) -> dict[str, Any]:
    """Return the fields of a mixed fleet that both kinds have."""
    usd = sum(pool.usd_per_hour for pool in pools)
    observed = zip(question.objectives.slos, figures.observed, strict=True)
    return {
        "pools": pools,
        "gpus": sum(pool.gpus for pool in pools),
        "usd_per_hour": usd,
        "change": usd / dearest - 1 if dearest else None,
        "attainment": figures.attainment,
        "observed": {objective.text: value for objective, value in observed},
        "tok_s_user": figures.tok_s_user,
        **figures.trust._asdict(),
    }
