"""The robustness of an answer: at the ends of the interval of step times, as a probability, and at higher rates.

Each measure is computed in one worker. The next number to try comes from bisection, or from an estimate of the number
at which an objective breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import SURE
from tokentwin.planning.plan.draws import on_draw
from tokentwin.planning.plan.search import Bisection
from tokentwin.planning.plan.trial import FAST, LIKELY, SLOW, Question, Trial, at_share, cost_at, simulated

_FIRST_PERCENT = 10  # increase of the rate that is tried first, because most fleets sized by bisection break near it
_NEAR = 1 / 8  # precision of the headroom, as a share of the headroom
KEEPING_UP = "keeping up with what arrives"


def replicas_at(question: Question, engine: Engine, replicas: int, most: int) -> tuple[int, int, int | None]:
    """Return the fewest replicas at the fast end of the interval of step times, as predicted, and at the slow end.

    `replicas` meet the objectives as predicted. Faster steps are assumed never to need more replicas, and slower steps
    never fewer. The uncertainty of step times depends on the steps that occur, which are here those of a run with
    `replicas`. The last number is None if `most` replicas are too few.
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
    question: Question,
    engine: Engine,
    replicas: int,
    least: float = 0.0,
    wanted: float = 0.0,
    draw: int | None = None,
    most: float = SURE,
) -> float | None:
    """Return the probability that `replicas` meet all objectives, in whole percent up to `most`; None if not known.

    They are known to meet them with probability `least`; this is the answer if the probability is below `wanted`. If
    slower steps meet an objective, faster steps are assumed to meet it, too. `draw` is the index of another draw of the
    traffic. Its step times are assumed to be equally certain; if their error is unknown, the answer is 1 or 0.
    """
    traffic, drawn_engine = (question, engine) if draw is None else on_draw(question, engine, draw)
    cost = cost_at(question, engine, replicas, LIKELY)
    if cost.at_share(SURE) is cost:
        return None if draw is None else float(at_share(traffic, drawn_engine, replicas, LIKELY).met)

    def trial_at(percent: int) -> Trial:
        if draw is None:
            return at_share(question, engine, replicas, percent / 100, to_the_end=True)
        cost = cost_at(question, engine, replicas, percent / 100, drawn_engine)
        return simulated(traffic, drawn_engine, cost, replicas, to_the_end=True)

    if wanted > least:
        if not at_share(question, engine, replicas, wanted).met:
            return least
        least = wanted
    low, high = round(100 * least), round(100 * most) + 1
    likely, planned = round(100 * LIKELY), round(100 * (1 - question.risk))
    first = (likely, planned) if draw is None else (high - 1, planned)
    return last_to_hold(low, high, trial_at, first, lambda percent: NormalDist().inv_cdf(percent / 100)).last / 100


class LastToHold(NamedTuple):
    """The last number that meets all objectives, its run, and the run of the lowest number that breaks an objective."""

    last: int
    run: Trial | None = None
    broken: Trial | None = None


def last_to_hold(
    low: int,
    high: int,
    trial_at: Callable[[int], Trial],
    first: Sequence[int],
    place: Callable[[int], float],
    near: float = 0.0,
) -> LastToHold:
    """Return approximately the last number below `high` that meets all objectives; `low` is known to meet them.

    The returned number was simulated, or is `low`. The true last number may be greater by up to a share `near`. The
    numbers `first` are tried first. Later numbers follow from the excess over a bound in whole runs. The excess is
    assumed to grow as a power of a quantity whose logarithm is `place`.
    """
    excess: dict[int, float] = {}  # logarithms, by number
    answer, left = LastToHold(low), list(first)
    while high - low > 1:
        guided = answer.broken is None or high in excess  # otherwise the fleet did not keep up
        number = left.pop(0) if left else _next_within(low, high, excess if guided else {}, place, near)
        if number is None:
            break
        if number >= high:
            continue
        trial = trial_at(number)
        beyond = trial.figures.excess if trial.figures is not None else math.nan
        if 0 < beyond < math.inf and (beyond <= 1) == trial.met:
            excess[number] = math.log(beyond)
        if not trial.met:
            high, answer = number, answer._replace(broken=trial)
        elif number >= low:
            low, answer = number, answer._replace(last=number, run=trial)
    return answer


def _next_within(
    low: int, high: int, excess: Mapping[int, float], place: Callable[[int], float], near: float
) -> int | None:
    """Return the number between `low` and `high` to try next, by a line through the two runs nearest to the bound.

    Returns None if `low` is near enough. The number is a share `near` below the number that the line gives, because
    queues grow faster than the line.
    """
    met, beyond = ([number for number in sorted(excess) if (excess[number] > 0) == over] for over in (False, True))
    if len(excess) < 2 or not met:
        return (low + high) // 2
    a, b = (met[-1], beyond[0]) if beyond else met[-2:]
    slope = (excess[b] - excess[a]) / (place(b) - place(a))
    inside = (number for number in range(low + 1, high) if excess[a] + slope * (place(number) - place(a)) <= 0)
    last = min(max(inside, default=low), 2 * b + _FIRST_PERCENT)
    less = max(int(near * last), 1)
    if last == high - 1 and not beyond:
        return last if last > low else None
    return last - less if last > low + less else None


@dataclass(frozen=True)
class Knee:
    """The largest percentage by which the rate may grow while the fleet still meets all objectives.

    `breaks` is the objective that breaks at higher rates, or `KEEPING_UP`; None if the highest rate tried breaks none.
    """

    headroom_percent: int
    breaks: str | None


def knee(question: Question, engine: Engine, replicas: int, most_percent: int = 300) -> Knee:
    """Return the knee in whole percents, exact to an eighth of the headroom.

    The same requests arrive faster, and steps are as slow as the accepted risk demands.
    """

    def trial_at(percent: int) -> Trial:
        return _faster(question, engine, replicas, max(1 - question.risk, LIKELY), percent)

    last, run, broken = last_to_hold(0, most_percent + 1, trial_at, (0, _FIRST_PERCENT), _growth, near=_NEAR)
    if last == most_percent:
        return Knee(last, None)
    nearest = broken or run
    return Knee(last, first_broken(question, nearest) if nearest else None)


def headroom_band(
    question: Question, engine: Engine, replicas: int, holds: Sequence[float | None], most_percent: int = 300
) -> tuple[int, int | None] | None:
    """Return `Knee.headroom_percent` at the slow and at the fast end of the 90 % interval of step times.

    `holds` are the probabilities that the fleet meets the objectives on the planned traffic and on each other draw. If
    it breaks one with slow steps on any of them, the slow end is 0. The fast end is None if no rate that was tried
    broke an objective. Returns None if the error of step times is unknown.
    """
    known = [p for p in holds if p is not None]
    if len(known) < len(holds):
        return None
    slow, fast = (partial(_faster, question, engine, replicas, end) for end in (SLOW, FAST))
    first = (0, _FIRST_PERCENT)
    least = last_to_hold(0, most_percent + 1, slow, first, _growth, _NEAR).last if min(known) >= SLOW else 0
    most = last_to_hold(least, most_percent + 1, fast, (0, 2 * least + _FIRST_PERCENT), _growth, _NEAR).last
    return least, None if most == most_percent else most


def _growth(percent: int) -> float:
    return math.log1p(percent / 100)


def _faster(question: Question, engine: Engine, replicas: int, share: float, percent: int) -> Trial:
    """Simulate the same requests at a rate increased by `percent`, with step times not exceeded in `share` of cases."""
    if not percent:
        return at_share(question, engine, replicas, share, to_the_end=True)
    faster = question.at_scale(1 + percent / 100)
    return simulated(faster, engine, cost_at(question, engine, replicas, share), replicas, to_the_end=True)


def first_broken(question: Question, trial: Trial) -> str:
    """Return the objective furthest beyond its bound, or nearest to it; `KEEPING_UP` if only keeping up failed."""
    if (figures := trial.figures) is None:
        return trial.broken.text if trial.broken else KEEPING_UP
    worst = question.objectives.slos[figures.worst].text
    return worst if trial.met or figures.excess > 1 else KEEPING_UP
