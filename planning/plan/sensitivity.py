"""How far an answer can be trusted: at the ends of the cost model's interval, how probably it holds, at higher rates.

All are bisections, run to the end by one worker each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from calibration.steps.observed import JudgedCost
from planning.plan.bisection import Bisection
from planning.plan.candidates import Engine
from planning.plan.draws import on_draw
from planning.plan.trial import Question, Trial, simulated, try_fleet
from traces.reshape import reshaped

_FIRST_PERCENT = 10  # of more rate: most fleets sized by bisection break not far beyond
SURE = 0.99  # the greatest probability that is told: nobody knows the tail beyond
KEEPING_UP = "keeping up with what arrives"


@dataclass(frozen=True)
class End:
    """The fewest replicas if all steps take as long as at one end of the interval; None if `most` are too few."""

    replicas: int | None
    standing: str
    reason: str


def replicas_at(question: Question, engine: Engine, replicas: int, most: int) -> tuple[End, End, End]:
    """At the fast end, as predicted, and at the slow end, where `replicas` hold as predicted.

    Faster steps are taken never to need more, slower never fewer. The interval depends on which steps the run asks for,
    so the centre is simulated once more.
    """
    centre = question.pricing(engine)
    simulated(question, engine, centre, replicas, to_the_end=True)
    mark, reason = centre.provenance()

    def fewest(cost: JudgedCost, search: Bisection) -> End:
        while not search.done:
            number = search.ask()
            search = search.answered(number, simulated(question, engine, cost, number).met)
        return End(search.high, mark.name.lower(), reason)

    fast_end, slow_end = centre.ends()
    fast = fewest(fast_end, Bisection(low=0, high=replicas, most=replicas, start=1))
    assert fast.replicas is not None
    likely = fewest(centre, Bisection(low=fast.replicas - 1, high=replicas, most=replicas, start=1))
    assert likely.replicas is not None
    return fast, likely, fewest(slow_end, Bisection(low=likely.replicas - 1, most=most, start=replicas))


def holding(
    question: Question, engine: Engine, replicas: int, least: float = 0.0, draw: int | None = None
) -> float | None:
    """The probability that so many replicas meet all objectives, in whole percent up to `SURE`; None if not known.

    They do at `least`. Faster steps are taken never to break what slower ones keep. On another `draw` of the traffic it
    is 1 or 0 if nothing is known of how far off step times are.
    """
    if draw is not None:
        question, engine = on_draw(question, engine, draw)
    centre = question.pricing(engine)
    likely = simulated(question, engine, centre, replicas, to_the_end=True)
    if centre.at(SURE) is centre:
        return None if draw is None else float(likely.met)
    low, most = round(100 * least), round(100 * SURE)
    search = Bisection(low=low, most=most, start=max((low + most) // 2, 1))
    while not search.done:
        percent = search.ask()
        search = search.answered(percent, not simulated(question, engine, centre.at(percent / 100), replicas).met)
    return SURE if search.high is None else (search.high - 1) / 100


@dataclass(frozen=True)
class Knee:
    """How many percent more rate, at most, the fleet takes and still meets all objectives.

    `breaks` is the objective that breaks beyond that, or `KEEPING_UP`; None if none does up to the highest rate tried.
    """

    headroom_percent: int
    breaks: str | None


def knee(question: Question, engine: Engine, replicas: int, most_percent: int = 300) -> Knee:
    """By bisection over whole percents; the same requests arrive faster."""
    search, breaks = Bisection(low=0, most=most_percent, start=_FIRST_PERCENT), None
    while not search.done:
        percent = search.ask()
        faster = replace(question, workload=reshaped(question.workload, rate_scale=1 + percent / 100))
        trial = try_fleet(faster, engine, replicas)
        search = search.answered(percent, not trial.met)
        if not trial.met:  # each at less traffic than the one before, so that the last is at the knee
            breaks = _broken(question, trial.decisive)
    return Knee(search.low, breaks)


def _broken(question: Question, trial: Trial) -> str:
    """The first to break or, of a run that went to its end, the one furthest beyond its bound; else keeping up."""
    if trial.broken is not None:
        return trial.broken.text
    figures = trial.figures
    assert figures is not None
    worst = question.objectives.each[figures.worst]
    return worst.text if worst.excess(figures.observed[figures.worst]) > 1 else KEEPING_UP
