"""From a question to an answer: search, rank, and ask of the winner what a planner would ask next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from planning.plan.candidates import Engine, RuledOut
from planning.plan.curves import fleet_point
from planning.plan.document import Dearer, FleetPoint, Infeasible
from planning.plan.frontier import Point, pareto, per_dollar, point
from planning.plan.search import OnProgress, Searched, search, silent
from planning.plan.sensitivity import Knee, headroom_band, knee, replicas_at
from planning.plan.trial import Question, Trial, nearly_alone, try_fleet, try_more
from planning.plan.worth import Held, held, most_worth
from planning.workers import Task, Workers

RUNNERS_UP = 3
# Simulations, more or less, of and around the answer, and of what becomes of other choices on all draws.
_KNEE, _HEADROOM, _ENDS, _NEAR, _CHOICES = 4, 6, 3, 2, 5


@dataclass(frozen=True)
class Limits:
    """What a search may buy: at most so many replicas to carry the traffic, and so many spares besides."""

    most: int = 1024
    spares: int = 0


@dataclass(frozen=True)
class Offer:
    """A fleet that meets all objectives, the fewest replicas of its engine that do."""

    engine: Engine
    point: Point
    trial: Trial


@dataclass(frozen=True)
class Recommendation:
    """The offer of most worth and what stands behind it.

    held        how probably it meets all objectives
    fewer       one replica fewer, run to the end; None if that is none
    fast, slow  the fewest replicas at the ends of the cost model's 90 % interval, and
    likely      as predicted
    knee        how much more traffic it takes
    headroom    the same from slow steps to fast ones, in percent (`headroom_band`)
    choices     by replicas: this fleet, the likely one and the slow one, and how probably each holds
    """

    offer: Offer
    held: Held
    fewer: Trial | None
    fast: int
    likely: int
    slow: int | None
    knee: Knee
    headroom: tuple[int, int | None] | None
    choices: Mapping[int, tuple[FleetPoint, Held]]


@dataclass(frozen=True)
class Plan:
    """The answer. Without a recommendation it is infeasible, and the first of `failures` came closest.

    runners_up  the next cheapest, of other engines
    dearer      engines that were given up, the cheapest first
    failures    engines of which no number of replicas will do, the closest first; then what fits on no GPU
    frontier    the fleets simulated that none beats in tokens/s of a user and of a GPU, and
    by_price    in tokens/s of a user and tokens for a dollar
    points      all fleets simulated to the end, by engine and replicas
    trials      how many fleets were simulated in the search
    """

    question: Question
    limits: Limits
    recommendation: Recommendation | None
    runners_up: tuple[Offer, ...]
    dearer: tuple[Dearer, ...]
    failures: tuple[Infeasible, ...]
    frontier: tuple[Point, ...]
    by_price: tuple[Point, ...]
    points: tuple[Point, ...]
    trials: int


def make_plan(
    workers: Workers[Question],
    engines: Sequence[Engine],
    ruled_out: Sequence[RuledOut],
    limits: Limits,
    progress: OnProgress = silent,
) -> Plan:
    """The fleet of one of `engines` that is worth most (`most_worth`) of those that hold with the risk that is taken.

    Mostly that is the cheapest; among equally dear ones that of fewer GPUs, then of higher attainment. It has as many
    replicas as hold with that risk on other draws of the traffic, too.
    """
    question = workers.common
    after = _KNEE + _HEADROOM + _ENDS + _NEAR + _CHOICES
    found = search(
        workers,
        engines,
        limits.most,
        limits.spares,
        RUNNERS_UP + 1,
        lambda left: progress(left + after),
    )
    offers = sorted(
        (_offer(entry, limits.spares) for entry in found if entry.replicas is not None),
        key=lambda offer: (offer.point.usd_per_hour, offer.point.gpus, -offer.point.attainment),
    )
    trials = [(entry.engine, trial) for entry in found for trial in entry.trials]
    recommendation = None
    if offers:
        held, offers = _by_worth(workers, offers, limits)
        recommendation, more = _recommended(workers, offers, held, limits, trials, progress)
        more.append((offers[0].engine, offers[0].trial))
        trials += more
    dearer = [
        Dearer(engine=entry.engine.name, usd_per_hour_at_least=entry.usd_per_hour(entry.least, limits.spares))
        for entry in found
        if entry.pruned
    ]
    failed = [entry for entry in found if entry.replicas is None and not entry.pruned]
    near = workers.run([partial(nearly_alone, engine=entry.engine) for entry in failed])
    failures = [_failure(question, entry, nearly, limits.most) for entry, nearly in zip(failed, near, strict=True)]
    points = {
        (engine.name, trial.replicas): point(engine, trial, limits.spares) for engine, trial in trials if trial.figures
    }
    return Plan(
        question=question,
        limits=limits,
        recommendation=recommendation,
        runners_up=tuple(offers[1:]),
        dearer=tuple(sorted(dearer, key=lambda entry: entry.usd_per_hour_at_least)),
        failures=(
            *(failure for _, failure in sorted(failures, key=lambda failure: failure[0])),
            *(Infeasible(engine=name, reason=reason) for name, reason in ruled_out),
        ),
        frontier=tuple(pareto(points.values())),
        by_price=tuple(pareto(points.values(), per_dollar)),
        points=tuple(points[key] for key in sorted(points)),
        trials=sum(len(entry.trials) for entry in found),
    )


def _offer(entry: Searched, spares: int) -> Offer:
    trial = next(trial for trial in entry.trials if trial.replicas == entry.replicas)
    return Offer(entry.engine, point(entry.engine, trial, spares), trial)


def _by_worth(workers: Workers[Question], offers: Sequence[Offer], limits: Limits) -> tuple[Held, list[Offer]]:
    """How probably the offer of most worth holds, and the offers with that one first, one of each engine."""
    fewest = [(offer.engine, offer.trial.replicas) for offer in offers[: RUNNERS_UP + 1]]
    best, held = most_worth(workers, fewest, limits.most, limits.spares)
    chosen = next(offer for offer in offers if offer.engine is best.engine)
    others = [offer for offer in offers if offer is not chosen]
    if chosen.trial.replicas != best.replicas:
        (trial,) = workers.run([partial(try_fleet, engine=best.engine, replicas=best.replicas, to_the_end=True)])
        chosen = Offer(best.engine, point(best.engine, trial, limits.spares), trial)
    return held, [chosen, *others]


def _recommended(
    workers: Workers[Question],
    offers: Sequence[Offer],
    held: Held,
    limits: Limits,
    known: Sequence[tuple[Engine, Trial]],
    progress: OnProgress,
) -> tuple[Recommendation, list[tuple[Engine, Trial]]]:
    """The first offer examined, and trials for the frontier: a replica fewer and a few more.

    Those that are `known` to their end are not made again.
    """
    best = offers[0]
    engine, replicas = best.engine, best.trial.replicas
    there = {(of.name, trial.replicas) for of, trial in known if trial.decisive.figures}
    around = [
        (number, try_more if number > replicas else partial(try_fleet, to_the_end=True))
        for number in (replicas - 1, replicas + max(replicas // 4, 1))
        if 1 <= number <= limits.most and (engine.name, number) not in there
    ]
    tasks: list[Task[Question, Any]] = [  # the longest first, and what others may need before them
        partial(headroom_band, engine=engine, replicas=replicas, holds=(held.planned, *held.draws)),
        *(partial(attempt, engine=engine, replicas=number) for number, attempt in around),
        partial(knee, engine=engine, replicas=replicas),
        partial(replicas_at, engine=engine, replicas=replicas, most=limits.most),
    ]
    progress(_KNEE + _HEADROOM + _ENDS + len(around) + _CHOICES)
    headroom, *trials, found_knee, (fast, likely, slow) = workers.run(tasks)
    progress(_CHOICES)
    more = [(engine, trial) for trial in trials]
    tried = [t for of, t in (*more, *known) if of is engine and t.replicas == replicas - 1 and t.decisive.figures]
    choices = _choices(workers, engine, {replicas: held}, [n for n in (likely, slow) if n])
    fewer = tried[0] if tried else None
    return Recommendation(best, held, fewer, fast, likely, slow, found_knee, headroom, choices), more


def _choices(
    workers: Workers[Question], engine: Engine, known: Mapping[int, Held], others: Sequence[int]
) -> dict[int, tuple[FleetPoint, Held]]:
    """By replicas what becomes of those that are `known` to hold so probably, and of the `others`."""
    more = [number for number in dict.fromkeys(others) if number not in known]
    found = {**known, **dict(zip(more, held(workers, [(engine, number) for number in more]), strict=True))}
    points = workers.run([partial(fleet_point, engine=engine, replicas=number) for number in found])
    return {number: (point, found[number]) for number, point in zip(found, points, strict=True)}


def _failure(question: Question, entry: Searched, nearly: bool, most: int) -> tuple[float, Infeasible]:
    """Why no fleet of an engine will do: which objective, and what was observed at best. By how much comes first.

    `nearly` says that it would at the fast end of the interval of step times.
    """
    assert entry.alone is not None
    alone = entry.alone.decisive.figures
    assert alone is not None
    objective, observed = question.objectives.each[alone.worst], alone.observed[alone.worst]
    excess = objective.excess(observed)
    if entry.alone.met:
        reason = f"{most} replicas are too few; see --max-replicas"
        return excess, Infeasible(engine=entry.engine.name, reason=reason)
    seen = question.objectives.seen(objective, observed, alone.broken)
    turned_away = f" ({alone.unfinished} requests fit in no replica)" if alone.unfinished else ""
    late = " if steps are slow" if entry.alone.late else ""
    reason = f"{objective.text}: {seen}{late}, with every request alone on a replica{turned_away}"
    return excess, Infeasible(engine=entry.engine.name, reason=reason, borderline=nearly)
