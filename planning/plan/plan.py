"""The plan that answers a question: the search, the ranking, and a closer look at the winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokentwin.planning.plan.candidates import Engine, RuledOut
from tokentwin.planning.plan.curves import fleet_point
from tokentwin.planning.plan.document import SURE, Dearer, FleetPoint, Infeasible
from tokentwin.planning.plan.frontier import Point, pareto, per_dollar, point
from tokentwin.planning.plan.omissions import Omissions
from tokentwin.planning.plan.search import OnProgress, Searched, search, silent
from tokentwin.planning.plan.sensitivity import Knee, headroom_band, knee, replicas_at
from tokentwin.planning.plan.trial import Question, Trial, nearly_alone, try_fleet, try_more
from tokentwin.planning.plan.worth import Probabilities, most_worth, probabilities_of
from tokentwin.planning.workers import Task, Workers

RUNNERS_UP = 3
# Approximate numbers of simulations for the worth of the offers, for the answer, for the fleets around it, and for one
# other choice on all draws, counted for an hour of the Azure trace.
_WORTH, _KNEE, _HEADROOM, _ENDS, _NEAR, _CHOICE = 7, 4, 6, 3, 2, 8


@dataclass(frozen=True)
class Limits:
    """The limits of a search: the maximum number of replicas that serve the traffic, and the number of spares."""

    most: int = 1024
    spares: int = 0


@dataclass(frozen=True)
class Offer:
    """A fleet that meets all objectives, and the probability of that; by default it has the fewest such replicas."""

    engine: Engine
    point: Point
    trial: Trial
    probabilities: Probabilities | None = None

    @property
    def weight(self) -> float:
        """The dollars an hour, or GPUs, of the fleet with its spares."""
        return float(self.point.gpus) if self.engine.counts_gpus else self.point.usd_per_hour


@dataclass(frozen=True)
class Recommendation:
    """The offer with the highest worth, and the probabilities that it meets all objectives.

    The `robustness` is None if it was not examined.
    """

    offer: Offer
    probabilities: Probabilities
    robustness: Robustness | None = None


@dataclass(frozen=True)
class Robustness:
    """Fewer replicas than recommended, more traffic, and faster and slower steps.

    Attributes:
        fewer: a trial of one replica fewer, run to the end; None if no replica would be left
        fewer_point: its attainment as predicted, with the band; None if `fewer` is None
        fast, slow: fewest replicas that meet the objectives at the fast and the slow end of the 90 % interval of step
            times; `slow` is None if no number does
        likely: fewest replicas that meet the objectives if steps are as predicted
        knee: largest increase of the traffic that the fleet can take
        headroom: the increase in percent with slow steps and with fast steps (`headroom_band`)
        choices: points and probabilities by number of replicas: of this fleet, and of the likely and the slow number
    """

    fewer: Trial | None
    fewer_point: FleetPoint | None
    fast: int
    likely: int
    slow: int | None
    knee: Knee
    headroom: tuple[int, int | None] | None
    choices: Mapping[int, tuple[FleetPoint, Probabilities]]


@dataclass(frozen=True)
class Plan:
    """The answer. Without a recommendation it is infeasible, and the first of `failures` came closest.

    Attributes:
        runners_up: the next cheapest offers, of other engines
        dearer: engines whose search ended early because they cost more, the cheapest first
        failures: engines for which no number of replicas is enough, the closest first; then engines that fit on no GPU
        frontier: simulated fleets that no other fleet beats in both tokens/s of a user and tokens/s of a GPU
        by_price: simulated fleets that no other fleet beats in both tokens/s of a user and tokens per dollar
        points: all fleets simulated to the end, by engine and replicas
        trials: number of fleets simulated in the search
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
    on_answer: Callable[[Plan], None] = lambda plan: None,
    omissions: Omissions | None = None,
) -> Plan:
    """Return the plan for the fleet with the highest worth (`most_worth`) that meets the SLOs with the accepted risk.

    Usually that is the cheapest fleet. Among fleets with equal prices it is the fleet with fewer GPUs, then the fleet
    with higher attainment. It has enough replicas to meet the SLOs with that risk on other draws of the traffic, too.
    `on_answer` gets the plan when its fleet is known and its robustness is not; should that fail, it is among the
    `omissions`.
    """
    omissions = omissions or Omissions()
    after = _WORTH + _KNEE + _HEADROOM + _ENDS + 2 * _NEAR + _CHOICE
    searched = search(
        workers,
        engines,
        limits.most,
        limits.spares,
        RUNNERS_UP + 1,
        lambda left: progress(left + after),
    )
    offers = _offers(searched, limits)
    if offers:
        offers = _by_worth(workers, offers, limits)
        reopened = _reopened(searched, offers[0], limits)
        if reopened != searched:  # other draws raised the answer's price above engines given up for theirs
            dearest = _may_win_below(offers[0])
            searched = search(
                workers, engines, limits.most, limits.spares, RUNNERS_UP + 1, resumed=reopened, dearest=dearest
            )
            offers = _by_worth(workers, _offers(searched, limits), limits)
    trials = [(entry.engine, trial) for entry in searched for trial in entry.trials]
    plan = partial(_plan, workers.common, searched, ruled_out, limits)
    more: list[tuple[Engine, Trial]] = []
    recommendation = None
    if offers:
        best = offers[0]
        assert best.probabilities is not None
        recommendation = Recommendation(best, best.probabilities)
        trials.append((best.engine, best.trial))
        on_answer(plan(trials, recommendation, offers[1:]))
        robustness, more = omissions.part(
            "fewer GPUs, more traffic and slower steps",
            partial(_robustness, workers, best, best.probabilities, limits, trials, progress),
            (None, more),
        )
        recommendation = replace(recommendation, robustness=robustness)
    tasks = [partial(nearly_alone, engine=entry.engine) for entry in searched if entry.failed]
    nearly = omissions.part("fleets that fail by less than the error of step times", partial(workers.run, tasks), ())
    return plan([*trials, *more], recommendation, offers[1:], nearly)


def _plan(
    question: Question,
    searched: Sequence[Searched],
    ruled_out: Sequence[RuledOut],
    limits: Limits,
    trials: Sequence[tuple[Engine, Trial]],
    recommendation: Recommendation | None,
    runners_up: Sequence[Offer],
    nearly: Sequence[bool] = (),
) -> Plan:
    """Return the plan; `nearly` says of each engine that fails whether that is within the error of step times."""
    dearer = [
        Dearer(
            engine=entry.engine.name,
            usd_per_hour_at_least=(entry.least + limits.spares) * entry.engine.usd_per_hour,
            gpus_at_least=(entry.least + limits.spares) * entry.engine.gpus,
        )
        for entry in searched
        if entry.pruned
    ]
    failed = [entry for entry in searched if entry.failed]
    within = nearly or [False] * len(failed)
    failures = [_failure(question, entry, near, limits.most) for entry, near in zip(failed, within, strict=True)]
    points = {
        (engine.name, trial.replicas): point(engine, trial, limits.spares) for engine, trial in trials if trial.figures
    }
    return Plan(
        question=question,
        limits=limits,
        recommendation=recommendation,
        runners_up=tuple(runners_up),
        dearer=tuple(sorted(dearer, key=lambda entry: entry.usd_per_hour_at_least)),
        failures=(
            *(failure for _, failure in sorted(failures, key=lambda failure: failure[0])),
            *(Infeasible(engine=name, reason=reason) for name, reason in ruled_out),
        ),
        frontier=tuple(pareto(points.values())),
        by_price=tuple(pareto(points.values(), per_dollar)),
        points=tuple(points[key] for key in sorted(points)),
        trials=sum(len(entry.trials) for entry in searched),
    )


def _offer(entry: Searched, spares: int) -> Offer:
    trial = next(trial for trial in entry.trials if trial.replicas == entry.replicas)
    return Offer(entry.engine, point(entry.engine, trial, spares), trial)


def _offers(searched: Sequence[Searched], limits: Limits) -> list[Offer]:
    """Return the fewest replicas of each engine that meet the objectives, the cheapest first."""
    return sorted(
        (_offer(entry, limits.spares) for entry in searched if entry.replicas is not None),
        key=lambda offer: (offer.weight, offer.point.usd_per_hour, offer.point.gpus, -offer.point.attainment),
    )


def _may_win_below(best: Offer) -> float:
    """Return the weight at which a fleet with probability `SURE` is worth as much as `best`."""
    probability = best.probabilities.mean if best.probabilities else None
    return best.weight * (SURE / probability if probability else 1.0)


def _reopened(searched: Sequence[Searched], best: Offer, limits: Limits) -> list[Searched]:
    """Return `searched`, with the search open again for pruned engines that may be worth more than `best`."""
    below = _may_win_below(best)
    return [
        replace(entry, pruned=False) if entry.pruned and entry.weight(entry.least, limits.spares) < below else entry
        for entry in searched
    ]


def _by_worth(workers: Workers[Question], offers: Sequence[Offer], limits: Limits) -> list[Offer]:
    """Return the offer with the highest worth, then the next cheapest of other engines, with their probabilities."""
    sized = most_worth(workers, [(o.engine, o.trial.replicas) for o in offers], limits.most, limits.spares)
    by_engine = {fleet.engine.name: (fleet.replicas, probabilities) for fleet, probabilities in sized}
    best = sized[0][0].engine.name
    others = [offer for offer in offers if offer.engine.name != best]
    shown = [next(offer for offer in offers if offer.engine.name == best), *others[:RUNNERS_UP]]
    unknown = [offer for offer in shown if offer.engine.name not in by_engine]
    more = probabilities_of(workers, [(offer.engine, offer.trial.replicas) for offer in unknown])
    for offer, probabilities in zip(unknown, more, strict=True):
        by_engine[offer.engine.name] = offer.trial.replicas, probabilities
    grown = [o for o in shown if by_engine[o.engine.name][0] != o.trial.replicas]
    tasks = [partial(try_fleet, engine=o.engine, replicas=by_engine[o.engine.name][0], to_the_end=True) for o in grown]
    again = dict(zip((o.engine.name for o in grown), workers.run(tasks), strict=True))
    made = []
    for offer in shown:
        trial = again.get(offer.engine.name, offer.trial)
        probabilities = by_engine[offer.engine.name][1]
        made.append(Offer(offer.engine, point(offer.engine, trial, limits.spares), trial, probabilities))
    return [made[0], *sorted(made[1:], key=lambda offer: (offer.weight, offer.point.usd_per_hour, offer.point.gpus))]


def _robustness(
    workers: Workers[Question],
    best: Offer,
    probabilities: Probabilities,
    limits: Limits,
    known: Sequence[tuple[Engine, Trial]],
    progress: OnProgress,
) -> tuple[Robustness | None, list[tuple[Engine, Trial]]]:
    """Return the robustness of the best offer, and trials of one replica fewer and a few more for the frontier.

    Fleets whose `known` trial ran to its end are not tried again.
    """
    engine, replicas = best.engine, best.trial.replicas
    there = {(other.name, trial.replicas) for other, trial in known if trial.decisive.figures}
    around = [
        (number, try_more if number > replicas else partial(try_fleet, to_the_end=True))
        for number in (replicas - 1, replicas + max(replicas // 4, 1))
        if 1 <= number <= limits.most and (engine.name, number) not in there
    ]
    tasks: list[Task[Question, Any]] = [  # the longest task first, and each before tasks that may need its results
        partial(headroom_band, engine=engine, replicas=replicas, holds=(probabilities.planned, *probabilities.draws)),
        *(partial(attempt, engine=engine, replicas=number) for number, attempt in around),
        partial(knee, engine=engine, replicas=replicas),
        partial(replicas_at, engine=engine, replicas=replicas, most=limits.most),
    ]
    progress(_KNEE + _HEADROOM + _ENDS + len(around) + _NEAR + _CHOICE)
    headroom, *trials, growth, (fast, likely, slow) = workers.run(tasks)
    others = [number for number in dict.fromkeys((likely, slow)) if number and number != replicas]
    more = [(engine, trial) for trial in trials]
    own = (trial for other, trial in (*more, *known) if other is engine)
    fewer = next((trial for trial in own if trial.replicas == replicas - 1 and trial.decisive.figures), None)
    progress(_CHOICE * len(others) + (_NEAR if fewer else 0))
    simulated = probabilities_of(workers, [(engine, number) for number in others])
    holds = {replicas: probabilities, **dict(zip(others, simulated, strict=True))}
    numbers = list(dict.fromkeys([*holds, replicas - 1] if fewer else holds))
    drawn = workers.run([partial(fleet_point, engine=engine, replicas=number) for number in numbers])
    points = dict(zip(numbers, drawn, strict=True))
    choices = {number: (points[number], holds[number]) for number in holds}
    beside = points.get(replicas - 1) if fewer else None
    return Robustness(fewer, beside, fast, likely, slow, growth, headroom, choices), more


def _failure(question: Question, entry: Searched, nearly: bool, most: int) -> tuple[float, Infeasible]:
    """Return the excess over the bound, and the reason why no fleet of an engine meets the objectives.

    The reason names the objective and its best observed value. `nearly` is True if a fleet would meet the objectives at
    the fast end of the interval of step times.
    """
    assert entry.alone is not None
    alone = entry.alone.decisive.figures
    assert alone is not None
    objective, observed = question.objectives.slos[alone.worst], alone.observed[alone.worst]
    excess = objective.excess(observed)
    if entry.alone.met:
        reason = f"{most} replicas are not enough; raise --max-replicas"
        return excess, Infeasible(engine=entry.engine.name, reason=reason)
    seen = question.objectives.seen(objective, observed, alone.broken)
    turned_away = f" ({alone.unfinished} requests do not fit into any replica)" if alone.unfinished else ""
    late = " if steps are slow" if entry.alone.late else ""
    reason = f"{objective.text}: {seen}{late}, even with every request alone on a replica{turned_away}"
    return excess, Infeasible(engine=entry.engine.name, reason=reason, borderline=nearly)
