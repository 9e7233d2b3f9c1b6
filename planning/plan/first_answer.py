"""A plan within seconds, as a range: the cheapest fleet by a small part of each on its part of the traffic.

It is a first answer, and may be wrong; the whole one comes from whole fleets. Replicas behind a router that spreads
requests evenly are alike, so a few of them tell of all. One end of the range takes steps as predicted, the other as
slow as the risk asks. Where replicas get more requests than can be simulated at once, the first is of an ordinary
stretch of them and the second of the busiest: bursts decide how large a fleet must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from planning.plan.candidates import Engine
from planning.plan.frontier import Point, point
from planning.plan.plan import Limits
from planning.plan.search import search
from planning.plan.trial import Question, Trial, try_alone, try_fleet
from planning.workers import Workers
from serving.workload import WorkloadRequest

_ENOUGH = 100  # requests that the part of a fleet gets, at least
_MOST = 3  # times as many requests as are enough
_ALONE = 150  # when each has a replica to itself, latencies hardly differ


def first_answer(question: Question, engines: Sequence[Engine], limits: Limits) -> list[Point]:
    """The fleets at both ends of the range, the cheaper first; none where none will do at one end, or at both.

    Figures are of parts of them.
    """
    ends = [_cheapest(question, engines, limits, busiest) for busiest in (False, True)]
    return sorted(filter(None, ends), key=lambda end: (end.usd_per_hour, end.gpus))


def _cheapest(question: Question, engines: Sequence[Engine], limits: Limits, busiest: bool) -> Point | None:
    trial = partial(try_share, enough=_ENOUGH, busiest=busiest)
    question = question if busiest else replace(question, risk=max(question.risk, 0.5))
    with Workers(question, jobs=1) as workers:
        found = search(workers, engines, limits.most, limits.spares, keep=1, trial=trial, alone=try_some_alone)
    offers = (
        point(entry.engine, trial, limits.spares)
        for entry in found
        for trial in entry.trials
        if trial.replicas == entry.replicas
    )
    return min(offers, key=lambda offer: (offer.usd_per_hour, offer.gpus), default=None)


def try_share(question: Question, engine: Engine, replicas: int, enough: int, busiest: bool = True) -> Trial:
    """Whether `replicas` would do, by as few of them as get `enough` requests. Figures are of that part.

    Percentiles of few requests are unsure. A part that gets many is given a stretch of `_MOST` times `enough`: the
    busiest one, or one that is as busy as most.
    """
    requests = list(question.workload.requests)
    part = min(math.ceil(enough * replicas / len(requests)), replicas)
    taken = [requests[at] for at in range(len(requests)) if (at + 1) * part // replicas > at * part // replicas]
    stretch = _stretch(taken, _MOST * enough, busiest)
    return replace(try_fleet(_only(question, stretch), engine, part), replicas=replicas)


def _stretch(requests: list[WorkloadRequest], most: int, busiest: bool) -> list[WorkloadRequest]:
    """So many consecutive ones, by tokens a second: the most of all, or the median."""
    if len(requests) <= most:
        return requests
    begins = range(0, len(requests) - most + 1, max(most // 4, 1))
    before = [0, *accumulate(request.prompt_len + request.output_len for request in requests)]

    def tokens_per_ns(begin: int) -> float:
        last = begin + most
        span_ns = requests[last - 1].arrival_ns - requests[begin].arrival_ns
        return (before[last] - before[begin]) / max(span_ns, 1)

    ranked = sorted(begins, key=tokens_per_ns)
    begin = ranked[-1 if busiest else len(ranked) // 2]
    return requests[begin : begin + most]


def try_some_alone(question: Question, engine: Engine) -> Trial:
    """`try_alone` for the first `_ALONE` requests."""
    return try_alone(_only(question, list(question.workload.requests)[:_ALONE]), engine)


def _only(question: Question, requests: list[WorkloadRequest]) -> Question:
    return replace(question, workload=replace(question.workload, requests=requests), requests=len(requests))
