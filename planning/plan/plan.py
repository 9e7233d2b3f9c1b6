"""From a question to an answer: search, rank, and ask of the winner what a planner would ask next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from planning.plan.candidates import Engine, RuledOut
from planning.plan.document import Dearer, Infeasible
from planning.plan.draws import holds as draws_hold
from planning.plan.frontier import Point, pareto, per_dollar, point
from planning.plan.search import OnProgress, Progress, Searched, search, silent
from planning.plan.sensitivity import Alternatives, End, Knee, alternatives, knee, replicas_at_ends
from planning.plan.trial import Question, Trial, try_fleet
from planning.plan.worth import most_worth
from planning.workers import Task, Workers
from serving.workload import Workload

RUNNERS_UP = 3
_KNEE, _ENDS, _SURE, _NEAR = (
    14,
    6,
    16,
    3,
)  # simulations, more or less: of one fleet, and around each offer


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

    holds       the probability that it meets all objectives, as far as step times are concerned; None if not known
    others      what the bold and the careful would take of its engine
    fewer       one replica fewer, run to the end; None if that is none
    fast, slow  the fewest replicas at the ends of the cost model's 90 % interval
    knee        how much more traffic it takes
    draws       whether it meets all objectives on other draws of the traffic
    """

    offer: Offer
    holds: float | None
    others: Alternatives
    fewer: Trial | None
    fast: End
    slow: End
    knee: Knee
    draws: tuple[bool, ...] = ()


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
    draws: Sequence[Workload] = (),
) -> Plan:
    """The fleet of one of `engines` that is worth most (`most_worth`) of those that hold with the risk that is taken.

    Mostly that is the cheapest; among equally dear ones that of fewer GPUs, then of higher attainment. It is simulated
    on each of `draws`, other traffic of the same kind, too.
    """
    question = workers.common
    after = _KNEE + _ENDS + _SURE + _NEAR * min(len(engines), RUNNERS_UP + 1) + len(draws)
    found = search(
        workers,
        engines,
        limits.most,
        limits.spares,
        RUNNERS_UP + 1,
        lambda searching: progress(searching._replace(left=searching.left + after)),
    )
    offers = sorted(
        (_offer(entry, limits.spares) for entry in found if entry.replicas is not None),
        key=lambda offer: (offer.point.usd_per_hour, offer.point.gpus, -offer.point.attainment),
    )
    trials = [(entry.engine, trial) for entry in found for trial in entry.trials]
    recommendation = None
    if offers:
        holds, offers = _by_worth(workers, offers, limits)
        recommendation, more = _recommended(workers, offers, holds, limits, trials, len(engines), progress, draws)
        more.append((offers[0].engine, offers[0].trial))
        trials += more
    dearer = [
        Dearer(engine=entry.engine.name, usd_per_hour_at_least=entry.usd_per_hour(entry.least, limits.spares))
        for entry in found
        if entry.pruned
    ]
    failures = [
        _failure(question, entry, limits.most) for entry in found if entry.replicas is None and not entry.pruned
    ]
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


def _by_worth(workers: Workers[Question], offers: Sequence[Offer], limits: Limits) -> tuple[float | None, list[Offer]]:
    """The probability that the offer of most worth holds, and the offers with that one first, one of each engine."""
    fewest = [(offer.engine, offer.trial.replicas) for offer in offers[: RUNNERS_UP + 1]]
    best = most_worth(workers, fewest, limits.most, limits.spares)
    chosen = next(offer for offer in offers if offer.engine is best.engine)
    others = [offer for offer in offers if offer is not chosen]
    if chosen.trial.replicas != best.replicas:
        (trial,) = workers.run([partial(try_fleet, engine=best.engine, replicas=best.replicas, to_the_end=True)])
        chosen = Offer(best.engine, point(best.engine, trial, limits.spares), trial)
    return best.holds, [chosen, *others]


def _recommended(
    workers: Workers[Question],
    offers: Sequence[Offer],
    holds: float | None,
    limits: Limits,
    known: Sequence[tuple[Engine, Trial]],
    settled: int,
    progress: OnProgress,
    draws: Sequence[Workload],
) -> tuple[Recommendation, list[tuple[Engine, Trial]]]:
    """The first offer examined, and trials for the frontier: a replica fewer and a few more of each offer.

    Those that are `known` to their end are not made again.
    """
    best = offers[0]
    engine, replicas = best.engine, best.trial.replicas
    there = {(of.name, trial.replicas) for of, trial in known if trial.decisive.figures}
    around = [
        (offer.engine, number)
        for offer in offers[: RUNNERS_UP + 1]
        for number in _around(offer.trial.replicas, limits.most)
        if (offer.engine.name, number) not in there
    ]
    tasks: list[Task[Question, Any]] = [  # the longest first
        partial(alternatives, engine=engine, replicas=replicas, most=limits.most, holds=holds),
        partial(knee, engine=engine, replicas=replicas),
        partial(replicas_at_ends, engine=engine, replicas=replicas, most=limits.most),
        *(partial(draws_hold, engine=engine, replicas=replicas, traffic=traffic) for traffic in draws),
        *(partial(try_fleet, engine=of, replicas=number, to_the_end=True) for of, number in around),
    ]
    runs = [_SURE, _KNEE, _ENDS, *(1 for _ in (*draws, *around))]

    def report(last: int) -> None:
        progress(Progress(settled, len(known) + sum(runs[: last + 1]), sum(runs[last + 1 :])))

    others, found_knee, (fast, slow), *rest = workers.run(tasks, report)
    held, trials = rest[: len(draws)], rest[len(draws) :]
    more = [(of, trial) for (of, _), trial in zip(around, trials, strict=True)]
    tried = [t for of, t in (*more, *known) if of is engine and t.replicas == replicas - 1 and t.decisive.figures]
    fewer = tried[0] if tried else None
    return Recommendation(best, holds, others, fewer, fast, slow, found_knee, tuple(held)), more


def _around(replicas: int, most: int) -> list[int]:
    """Neighbours on the frontier, closer together near where the objective breaks."""
    near = (replicas - 1, replicas + 1, replicas + max(replicas // 4, 2))
    return [number for number in near if 1 <= number <= most]


def _failure(question: Question, entry: Searched, most: int) -> tuple[float, Infeasible]:
    """Why no fleet of an engine will do: which objective, and what was observed at best. By how much comes first."""
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
    reason = f"{objective.text}: {seen}, with every request alone on a replica{turned_away}"
    return excess, Infeasible(engine=entry.engine.name, reason=reason)
