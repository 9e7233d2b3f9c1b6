"""How far an answer can be trusted: at the ends of the cost model's interval, how probably it holds, at higher rates.

All are bisections, run to the end by one worker each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

from planning.plan.bisection import Bisection
from planning.plan.candidates import Engine
from planning.plan.document import SURE
from planning.plan.draws import on_draw
from planning.plan.trial import FAST, LIKELY, SLOW, Question, Trial, at_share, cost_at, simulated
from traces.reshape import reshaped

_FIRST_PERCENT = 10  # of more rate: most fleets sized by bisection break not far beyond
_GUESSES = 3  # shares that are tried because the last to hold should be there, before the distance is halved
KEEPING_UP = "keeping up with what arrives"


def replicas_at(question: Question, engine: Engine, replicas: int, most: int) -> tuple[int, int, int | None]:
    """The fewest at the fast end of the interval, as predicted, and at its slow end; `replicas` hold as predicted.

    Faster steps are taken never to need more, slower never fewer. How far off they may be depends on which steps the
    run asks for: those of `replicas` here. None where `most` are too few.
    """

    def fewest(share: float, search: Bisection) -> int | None:
        while not search.done:
            number = search.ask()
            if share == LIKELY or number == replicas:
                trial = at_share(question, engine, number, share)
            else:
                trial = simulated(question, engine, cost_at(question, engine, replicas, share), number)
            search = search.answered(number, trial.met)
        return search.high

    fast = fewest(FAST, Bisection(low=0, high=replicas, most=replicas, start=1))
    assert fast is not None
    likely = fewest(LIKELY, Bisection(low=fast - 1, high=replicas, most=replicas, start=1))
    assert likely is not None
    return fast, likely, fewest(SLOW, Bisection(low=likely - 1, most=most, start=replicas))


def holding(
    question: Question, engine: Engine, replicas: int, least: float = 0.0, draw: int | None = None
) -> float | None:
    """The probability that so many replicas meet all objectives, in whole percent up to `SURE`; None if not known.

    They do at `least`. Faster steps are taken never to break what slower ones keep. On another `draw` of the traffic it
    is 1 or 0 if nothing is known of how far off step times are.
    """
    if draw is not None:
        question, engine = on_draw(question, engine, draw)
    likely = at_share(question, engine, replicas, LIKELY, to_the_end=True)
    cost = cost_at(question, engine, replicas, LIKELY)
    if cost.at(SURE) is cost:
        return None if draw is None else float(likely.met)
    low, high = round(100 * least), round(100 * SURE) + 1  # they hold at `low`, and not, or nobody knows, at `high`
    planned, guesses = round(100 * (1 - question.risk)), _GUESSES
    while True:
        runs = {of[2]: trial for of, trial in question.runs.known.items() if of[:2] == (engine.name, replicas)}
        for share, trial in sorted(runs.items(), key=lambda run: run[0]):
            percent = round(100 * share)
            if low < percent < high and math.isclose(percent, 100 * share):
                low, high = (percent, high) if trial.met else (low, percent)
        if high - low == 1:
            return low / 100
        percent = planned if low < planned < high else (low + high) // 2
        if guesses and (guess := _last_to_hold(runs)) is not None:
            guesses -= 1
            percent = min(max(guess, low + 1), high - 1)
        at_share(question, engine, replicas, percent / 100)


def _last_to_hold(runs: Mapping[float, Trial]) -> int | None:
    """The percentage up to which objectives should hold, by the two slowest runs that went to their end.

    What is furthest beyond its bound grows about as a power of the time that steps take, which is lognormal.
    """
    normal = NormalDist()
    whole = [
        (normal.inv_cdf(share), math.log(trial.figures.excess))
        for share, trial in sorted(runs.items())
        if trial.figures is not None and 0 < trial.figures.excess < math.inf
    ]
    if len(whole) < 2 or whole[-1][1] <= whole[-2][1]:
        return None
    (reach, low), (further, high) = whole[-2:]
    return math.floor(100 * normal.cdf(further - high * (further - reach) / (high - low)))


@dataclass(frozen=True)
class Knee:
    """How many percent more rate, at most, the fleet takes and still meets all objectives.

    `breaks` is the objective that breaks beyond that, or `KEEPING_UP`; None if none does up to the highest rate tried.
    """

    headroom_percent: int
    breaks: str | None


def knee(question: Question, engine: Engine, replicas: int, most_percent: int = 300) -> Knee:
    """By bisection over whole percents; the same requests arrive faster, and steps are as slow as the risk has it."""
    search, breaks = Bisection(low=0, most=most_percent, start=_FIRST_PERCENT), None
    while not search.done:
        percent = search.ask()
        faster = replace(question, workload=reshaped(question.workload, rate_scale=1 + percent / 100))
        cost = cost_at(question, engine, replicas, max(1 - question.risk, LIKELY))
        trial = simulated(faster, engine, cost, replicas)
        search = search.answered(percent, not trial.met)
        if not trial.met:  # each at less traffic than the one before, so that the last is at the knee
            breaks = _broken(question, trial)
    return Knee(search.low, breaks)


def _broken(question: Question, trial: Trial) -> str:
    """The first to break or, of a run that went to its end, the one furthest beyond its bound; else keeping up."""
    if trial.broken is not None:
        return trial.broken.text
    figures = trial.figures
    assert figures is not None
    worst = question.objectives.each[figures.worst]
    return worst.text if worst.excess(figures.observed[figures.worst]) > 1 else KEEPING_UP
