"""Other draws of the traffic: they show whether an answer holds beyond the one draw of arrivals it was found on.

A specification is drawn again from other seeds. A trace was drawn once, so its requests and its gaps are put into
another order, in blocks that keep bursts together (the block bootstrap, here without replacement: a request that came
twice would hit its own prompt in the prefix cache). Either way requests come at the planned rate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from planning.plan.candidates import Engine, long_enough
from planning.plan.trial import Question
from planning.traffic import mean_rate, waits_for_answers
from serving.errors import UserError
from serving.workload import Workload, WorkloadRequest
from traces.reshape import at_rate

DRAWS = 2
_BLOCKS = 20  # blocks of a trace: long enough to hold a burst, and enough of them to give other orders


def drawn_again(planned: Workload, draw: Callable[[int], Workload]) -> list[Workload]:
    """Return the workloads that `draw` makes from 1, 2, ..., each brought to the rate of `planned`.

    Draws that are refused are left out, such as one of very little traffic; empty if requests wait for others.
    """
    workloads: list[Workload] = []
    for number in range(1, DRAWS + 1) if not waits_for_answers(planned) else ():
        with suppress(UserError):
            workloads.append(at_rate(draw(number), mean_rate(planned)))
    return workloads


def reordered(planned: Workload) -> Callable[[int], Workload]:
    """Return a function from a number to `planned` in another order: blocks of requests with the gap before each."""
    requests = list(planned.requests)
    arrivals = [request.arrival_ns for request in requests]
    gaps = [after - before for before, after in pairwise(arrivals)]
    gaps.insert(0, round(sum(gaps) / len(gaps)))  # nothing came before the first request

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
    """Return the question of one of its `draws`, and the engine with room for it."""
    traffic = question.draws[draw]
    requests = sum(1 for _ in traffic.requests)
    there = replace(question, workload=traffic, requests=requests, draws=())
    return there, _with_room(engine, question.workload, traffic)


def _with_room(engine: Engine, planned: Workload, other: Workload) -> Engine:
    """Return the engine for `other`, if that has a longer request than `planned`.

    An engine with a stated length stays as it is, and so does our own, whose model has no more positions.
    """
    deployment, room = engine.deployment, engine.deployment.scheduler.max_model_len
    if all(request.prompt_len + request.output_limit <= room for request in other.requests):
        return engine
    with suppress(UserError):
        if long_enough(deployment, planned) == deployment:
            return replace(engine, deployment=long_enough(deployment, other))
    return engine
