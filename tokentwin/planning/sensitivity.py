"""How far an answer can be trusted: at the ends of the cost model's interval, and at higher rates.

Each is a bisection of its own, run to the end by one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tokentwin.planning.bisection import Bisection
from tokentwin.planning.engines import Engine
from tokentwin.planning.trial import Question, Trial, simulated

_FIRST_PERCENT = 10  # of more rate: most fleets sized by bisection break not far beyond


@dataclass(frozen=True)
class End:
    """The fewest replicas if all steps take as long as at one end of the interval; None if `most` are too few."""

    replicas: int | None
    standing: str
    reason: str


def replicas_at(question: Question, engine: Engine, replicas: int, most: int, end: Literal["fast", "slow"]) -> End:
    """Where `replicas` is the fewest at the centre; faster steps are taken never to need more, slower never fewer.

    The interval depends on which steps the run asks for, so the centre is simulated once more.
    """
    centre = question.pricing(engine)
    simulated(question, engine, centre, replicas, to_the_end=True)
    mark, reason = centre.standing()
    cost = centre.ends()[0 if end == "fast" else 1]
    if end == "fast":
        search = Bisection(low=0, high=replicas, most=replicas, start=1)
    else:
        search = Bisection(low=replicas - 1, most=most, start=replicas)
    while not search.done:
        number = search.ask()
        search = search.told(number, simulated(question, engine, cost, number).met)
    return End(search.high, mark.name.lower(), reason)


@dataclass(frozen=True)
class Knee:
    """How many percent more rate, at most, the fleet takes and still meets all objectives.

    `breaks` is the objective that breaks beyond that; None if none does up to the highest rate tried.
    """

    headroom_percent: int
    breaks: str | None


def knee(question: Question, engine: Engine, replicas: int, most_percent: int = 300) -> Knee:
    """By bisection over whole percents; the same requests arrive faster."""

    from traces.reshape import reshaped

    def faster(percent: int, to_the_end: bool = False) -> Trial:
        workload = reshaped(question.workload, rate_scale=1 + percent / 100)
        asked = replace(question, workload=workload)
        return simulated(asked, engine, question.pricing(engine), replicas, to_the_end)

    search = Bisection(low=0, most=most_percent, start=_FIRST_PERCENT)
    while not search.done:
        percent = search.ask()
        search = search.told(percent, not faster(percent).met)
    if search.high is None:
        return Knee(search.low, None)
    broken = faster(search.high, to_the_end=True).figures
    assert broken is not None
    return Knee(search.low, question.objectives.each[broken.worst].text)
