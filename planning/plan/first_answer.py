"""A plan within seconds: the cheapest fleet by a small part of each on its part of the traffic, then by a larger one.

It is a first answer, and may be wrong; the whole one comes from whole fleets. Replicas behind a router that spreads
requests evenly are alike, so a few of them tell of all. Their requests are taken evenly out of the whole traffic, never
its first ones only: a fleet needs time to fill, however many replicas it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planning.plan.candidates import Engine
from planning.plan.frontier import point
from planning.plan.plan import Limits
from planning.plan.search import search
from planning.plan.trial import Question, Trial, try_alone, try_fleet
from planning.workers import Workers
from serving.workload import WorkloadRequest

ENOUGH = (100, 500)  # requests that the part of a fleet gets, at least
_FIELDS = ("engine", "replicas", "gpus", "usd_per_hour", "met")  # what a part of a fleet tells of the whole
_MOST = 3  # times as many requests as are enough
_ALONE = 150  # when each has a replica to itself, latencies hardly differ


def first_answers(question: Question, engines: Sequence[Engine], limits: Limits) -> Iterator[dict[str, Any]]:
    """Each better than the one before: `point` has the fleet, without anything around it; None if none will do."""
    for enough in ENOUGH:
        with Workers(question, jobs=1) as workers:
            trial = partial(try_share, enough=enough)
            found = search(workers, engines, limits.most, limits.spares, keep=1, trial=trial, alone=try_some_alone)
        offers = [
            point(entry.engine, trial, limits.spares)
            for entry in found
            for trial in entry.trials
            if trial.replicas == entry.replicas
        ]
        best = min(offers, key=lambda offer: (offer.usd_per_hour, offer.gpus), default=None)
        yield {"point": best and {name: getattr(best, name) for name in _FIELDS}}


def try_share(question: Question, engine: Engine, replicas: int, enough: int) -> Trial:
    """Whether `replicas` would do, by as few of them as get `enough` requests. Figures are of that part.

    Percentiles of few requests are unsure. One replica that gets many is given no more than `_MOST` times `enough`.
    """
    requests = list(question.workload.requests)
    part = min(math.ceil(enough * replicas / len(requests)), replicas)
    taken = [request for at, request in enumerate(requests) if (at + 1) * part // replicas > at * part // replicas]
    return replace(try_fleet(_only(question, taken[: _MOST * enough]), engine, part), replicas=replicas)


def try_some_alone(question: Question, engine: Engine) -> Trial:
    """`try_alone` for the first `_ALONE` requests."""
    return try_alone(_only(question, list(question.workload.requests)[:_ALONE]), engine)


def _only(question: Question, requests: list[WorkloadRequest]) -> Question:
    return replace(question, workload=replace(question.workload, requests=requests), requests=len(requests))
