"""Curves around an answer: attainment with more and fewer replicas, and latency with more and less traffic.

Each point is a separate, complete run on the same requests; at other rates the requests arrive faster or slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from planning.plan.candidates import Engine
from planning.plan.document import FleetPoint, LoadPoint
from planning.plan.objectives import Objective
from planning.plan.trial import FAST, LIKELY, SLOW, Figures, Question, Trial, at_share
from planning.traffic import mean_rate
from planning.workers import Task, Workers
from traces.reshape import reshaped

# Shares of the rate at which an objective breaks. They are close together where latency begins to rise steeply.
_LOADS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)
_P99 = tuple(Objective(f"{metric} p99", ((metric, math.inf),), Fraction(99, 100)) for metric in ("ttft_ms", "tpot_ms"))


def fleet_curve(workers: Workers[Question], engine: Engine, replicas: int, most: int) -> list[FleetPoint]:
    """Return points around `replicas`: three with fewer and three with more replicas, further apart in large fleets."""
    stride = max(replicas // 8, 1)
    around = {replicas - 1, replicas + 1, *(replicas + stride * step for step in range(-3, 4))}
    numbers = sorted(number for number in around if 1 <= number <= most)
    tasks: list[Task[Question, FleetPoint]] = [
        partial(fleet_point, engine=engine, replicas=number) for number in numbers
    ]
    return workers.run(tasks)


def load_curve(workers: Workers[Question], engine: Engine, replicas: int, headroom_percent: int) -> list[LoadPoint]:
    """Return points from a low rate to beyond the rate at which an objective breaks, and one at the traffic's rate."""
    knee = 1 + headroom_percent / 100
    scales: Sequence[float] = sorted({1.0, *(round(knee * load, 4) for load in _LOADS)})
    tasks: list[Task[Question, LoadPoint]] = [
        partial(_load_point, engine=engine, replicas=replicas, scale=scale) for scale in scales
    ]
    return workers.run(tasks)


def fleet_point(question: Question, engine: Engine, replicas: int) -> FleetPoint:
    """Return the point for `replicas`, with step times as predicted and at both ends of their 90 % interval."""
    likely, fast, slow = (
        _whole(at_share(question, engine, replicas, share, to_the_end=True)) for share in (LIKELY, FAST, SLOW)
    )
    return FleetPoint(
        replicas=replicas,
        attainment=likely.attainment,
        if_slow=slow.attainment,
        if_fast=fast.attainment,
        tok_s_user_if_slow=slow.tok_s_user,
        tok_s_user_if_fast=fast.tok_s_user,
        **likely.trust._asdict(),
    )


def _whole(trial: Trial) -> Figures:
    assert trial.figures is not None
    return trial.figures


def _load_point(question: Question, engine: Engine, replicas: int, scale: float) -> LoadPoint:
    workload = reshaped(question.workload, rate_scale=scale)
    scaled = replace(question, workload=workload, objectives=replace(question.objectives, slos=_P99))
    figures = _whole(at_share(scaled, engine, replicas, LIKELY, to_the_end=True))
    ttft, tpot = figures.observed
    return LoadPoint(
        requests_per_s=scale * mean_rate(question.workload),
        ttft_p99_ms=ttft,
        tpot_p99_ms=tpot,
        attainment=figures.attainment,
        **figures.trust._asdict(),
    )
