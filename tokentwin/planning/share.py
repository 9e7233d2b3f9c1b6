"""A part of a fleet on its part of the traffic, in place of the whole: a first answer, not the answer.

Replicas behind a router that spreads requests evenly are alike, so a few of them tell of all. Their requests are taken
evenly out of the whole traffic, never its first ones only: a fleet needs time to fill, however many replicas it has.
"""

from __future__ import annotations

import math
from dataclasses import replace

from serving.workload import WorkloadRequest
from tokentwin.planning.engines import Engine
from tokentwin.planning.trial import Question, Trial, try_alone, try_fleet

ENOUGH = 500  # requests from which a 99th percentile can be told
_MOST = 1500  # requests simulated
_ALONE = 150  # when each has a replica to itself, latencies hardly differ


def try_share(question: Question, engine: Engine, replicas: int) -> Trial:
    """Whether `replicas` would do, by as few of them as get `ENOUGH` requests. Figures are of that part."""
    requests = list(question.workload.requests)
    part = min(math.ceil(ENOUGH * replicas / len(requests)), replicas)
    taken = [request for at, request in enumerate(requests) if (at + 1) * part // replicas > at * part // replicas][
        :_MOST
    ]
    return replace(try_fleet(_only(question, taken), engine, part), replicas=replicas)


def try_some_alone(question: Question, engine: Engine) -> Trial:
    """`try_alone` for the first `_ALONE` requests."""
    return try_alone(_only(question, list(question.workload.requests)[:_ALONE]), engine)


def _only(question: Question, requests: list[WorkloadRequest]) -> Question:
    return replace(question, workload=replace(question.workload, requests=requests), requests=len(requests))
