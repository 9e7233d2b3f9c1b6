"""Other random draws of the traffic, which show whether an answer holds beyond the draw for which it was found.

A specification is drawn again with other seeds. A trace exists only once, so its requests and gaps are put into another
order, in blocks that keep bursts together. This is the block bootstrap without replacement, because a request that came
twice would hit its own prompt in the prefix cache. In both cases requests arrive at the planned rate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tokentwin.planning.deployments import long_enough
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.trial import Question
from tokentwin.planning.traffic import mean_rate, waits_for_answers
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.reshape import at_rate

DRAWS = 2
_BLOCKS = 20  # number of blocks of a trace; blocks can hold a burst, and there are enough of them to reorder


def drawn_again(planned: Workload, draw: Callable[[int], Workload]) -> list[Workload]:
    """Return the workloads that `draw` makes from 1, 2, ..., each scaled to the rate of `planned`.

    Returns no workloads if requests wait for the answers to others.
    """
    if waits_for_answers(planned):
        return []
    return drawn(lambda number: at_rate(draw(number), mean_rate(planned)))


def drawn(draw: Callable[[int], Workload]) -> list[Workload]:
    """Return the workloads that `draw` makes from 1, 2, ....

    A draw that raises UserError, such as a draw with very little traffic, is left out.
    """
    workloads: list[Workload] = []
    for number in range(1, DRAWS + 1):
        with suppress(UserError):
            workloads.append(draw(number))
    return workloads


def reordered(planned: Workload) -> Callable[[int], Workload]:
    """Return a function that reorders the blocks of `planned` by a number; each request keeps the gap before it."""
    requests = list(planned.requests)
    arrivals = [request.arrival_ns for request in requests]
    gaps = [after - before for before, after in pairwise(arrivals)]
    gaps.insert(0, round(sum(gaps) / len(gaps)))  # the first request has no gap before it

    def draw(number: int) -> Workload:
        blocks = np.array_split(np.arange(len(requests)), min(_BLOCKS, len(requests)))
        order = np.random.Generator(np.random.PCG64(number)).permutation(len(blocks))
        moved: list[WorkloadRequest] = []
        now = 0
        for at in np.concatenate([blocks[block] for block in order]).tolist():
            now += gaps[at]
            moved.append(replace(requests[at], arrival_ns=now))
        return replace(planned, requests=sorted(moved, key=lambda request: (request.arrival_ns, request.id)))

    return draw


def on_draw(question: Question, engine: Engine, draw: int) -> tuple[Question, Engine]:
    """Return the question for one of its `draws`, and the engine with room for the longest request of the draw."""
    traffic = question.draws[draw]
    requests = sum(1 for _ in traffic.requests)
    there = replace(question, workload=traffic, requests=requests, draws=())
    return there, _with_room(engine, question.workload, traffic)


def _with_room(engine: Engine, planned: Workload, other: Workload) -> Engine:
    """Return the engine with room for the longest request of `other`, if it is longer than those of `planned`.

    An engine with a stated maximum length stays as it is. So does our own engine, because its model has no more
    positions.
    """
    deployment, room = engine.deployment, engine.deployment.scheduler.max_model_len
    if all(request.prompt_len + request.output_limit <= room for request in other.requests):
        return engine
    with suppress(UserError):
        if long_enough(deployment, planned) == deployment:
            return replace(engine, deployment=long_enough(deployment, other))
    return engine
