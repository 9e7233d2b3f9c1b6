"""A part of a fleet on its part of the traffic, in place of the whole: a first answer, not the answer.

Replicas behind a router that spreads requests evenly are alike, so a few of them tell of all. Their requests are taken
evenly out of the whole traffic, never its first ones only: a fleet needs time to fill, however many replicas it has.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planning.plan.candidates import Engine
from planning.plan.trial import Question, Trial, try_alone, try_fleet
from serving.workload import WorkloadRequest

_MOST = 3  # times as many requests as are enough
_ALONE = 150  # when each has a replica to itself, latencies hardly differ


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
