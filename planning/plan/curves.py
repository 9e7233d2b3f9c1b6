"""Curves around an answer: attainment by replicas, latency by traffic, and the capacity of each engine.

Each point is a separate, complete run on the same requests; at other rates the requests arrive faster or slower.

The capacity of an engine is its highest rate within the objectives; its curve also shows the speed for users at lower
rates. Equal numbers of two kinds of GPU that serve the same traffic give equal tokens per second and GPU, even if their
capacities differ, so each engine is simulated up to its highest rate. The simulation uses the busiest stretch of the
traffic, slowed down or sped up, on as many replicas as fit into the recommended GPUs, because fewer replicas would not
even out bursts as the fleet does. Steps take as long as predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import EngineCurve, FleetPoint, LoadPoint, RatePoint
from tokentwin.planning.plan.frontier import point
from tokentwin.planning.plan.objectives import Objective
from tokentwin.planning.plan.search import Bisection
from tokentwin.planning.plan.trial import FAST, LIKELY, SLOW, Figures, Question, Trial, at_share, simulated
from tokentwin.planning.traffic import mean_rate
from tokentwin.planning.workers import Task, Workers
from tokentwin.traces.reshape import only

# Shares of the rate at which an objective breaks. They are close together where latency begins to rise steeply.
_LOADS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)
_P99 = tuple(Objective(f"{metric} p99", ((metric, math.inf),), Fraction(99, 100)) for metric in ("ttft_ms", "tpot_ms"))


# Approximate numbers of simulations of the whole traffic: of two curves, and of an engine's if all requests are in it.
AROUND, LOAD, _OF_AN_ENGINE = 14.0, 18.0, 12.0


def engines_work(engines: int, requests: float) -> float:
    """Return the approximate work of `engine_curves`, in simulations of all `requests`."""
    return engines * _OF_AN_ENGINE * min(MOST_ARRIVALS / max(requests, 1.0), 1.0)


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
        broken_if_slow=" and ".join(question.objectives.seen_broken(slow.observed, slow.broken)),
        tok_s_user_if_slow=slow.tok_s_user,
        tok_s_user_if_fast=fast.tok_s_user,
        **likely.trust._asdict(),
    )


def _whole(trial: Trial) -> Figures:
    assert trial.figures is not None
    return trial.figures


def _load_point(question: Question, engine: Engine, replicas: int, scale: float) -> LoadPoint:
    some = question.at_scale(scale)
    scaled = replace(some, objectives=replace(question.objectives, slos=_P99))
    figures, slow = (_whole(at_share(scaled, engine, replicas, share, to_the_end=True)) for share in (LIKELY, SLOW))
    ttft, tpot = figures.observed
    ttft_if_slow, tpot_if_slow = slow.observed
    return LoadPoint(
        requests_per_s=_rate(question, scale, figures),
        ttft_p99_ms=ttft,
        tpot_p99_ms=tpot,
        ttft_p99_if_slow_ms=ttft_if_slow,
        tpot_p99_if_slow_ms=tpot_if_slow,
        attainment=figures.attainment,
        **figures.trust._asdict(),
    )


def _rate(question: Question, scale: float, figures: Figures) -> float:
    """Return the mean requests per second at `scale`; if clients wait for answers, those that they have sent."""
    return scale * mean_rate(question.workload) if question.loop is None else figures.steady.requests_per_s or 0.0


_REPLICAS, MOST_ARRIVALS = 16, 4000  # maximum numbers of replicas and of requests that are simulated
_SHARES = (0.15, 0.35, 0.6, 0.8)  # shares of the highest rate that are simulated, too
_FINEST = 1.05  # ratio of two neighbouring rates
_BEYOND = (2, 3, 5, 8)  # numbers of rates above the first that breaks an objective, which are tried, too
_CLIENTS = 170  # the same for clients who wait, up to 4 times as many: each of them has requests of their own
_LEAST, _RATES = 1e-3, 200  # lowest rate as a share of the traffic's; number of rates, up to 17 times the traffic's


def engine_curves(
    workers: Workers[Question], engines: Sequence[Engine], best: Engine, planned: int
) -> list[EngineCurve]:
    """Return a curve for each engine, in the given order, on the GPUs of `planned` replicas of the engine `best`.

    No more than `_REPLICAS` replicas are simulated. A curve has no points if they meet the objectives at no rate. The
    curve of `best` also has the point of the planned traffic.
    """
    gpus = planned * best.gpus
    tasks: list[Task[Question, EngineCurve]] = [
        partial(
            _curve,
            engine=engine,
            replicas=max(min(gpus // engine.gpus, _REPLICAS), 1),
            planned=planned if engine.name == best.name else None,
        )
        for engine in engines
    ]
    return workers.run(tasks)


def _curve(question: Question, engine: Engine, replicas: int, planned: int | None) -> EngineCurve:
    """Return the curve for `replicas`; with the point at which each has as much traffic as each of `planned`."""
    some = _busiest(question)

    def trial_at(scale: float, to_the_end: bool) -> Trial:
        asked = some.at_scale(scale)
        return simulated(asked, engine, asked.pricing(engine), replicas, to_the_end)

    most = _RATES if question.loop is None else _CLIENTS
    search = Bisection(low=0, most=most, start=_RATES // 2)
    while not search.done:
        number = search.ask()
        search = search.answered(number, not trial_at(_LEAST * _FINEST**number, to_the_end=False).met)
    # Near the limit, chance may break an objective at one rate and not at a higher one.
    beyond = (search.low + more for more in _BEYOND)
    met = (number for number in beyond if search.low and trial_at(_LEAST * _FINEST**number, to_the_end=False).met)
    highest = _LEAST * _FINEST ** max(met, default=search.low)

    def at(scale: float) -> RatePoint:
        trial = trial_at(scale, to_the_end=True)
        assert trial.figures is not None
        rate = _rate(some, scale, trial.figures) / replicas
        at_a_time = rate * trial.figures.e2e_mean_s  # Little's law
        return RatePoint(**dict(point(engine, trial)), requests_per_s=rate, concurrency=at_a_time)

    return EngineCurve(
        engine=engine.name,
        gpu=engine.gpu,
        points=tuple(at(load * highest) for load in (*_SHARES, 1.0)) if search.low else (),
        planned=None if planned is None else at(replicas / planned),
    )


def _busiest(question: Question) -> Question:
    """Return `question` with the stretch of up to `MOST_ARRIVALS` consecutive requests that has the most tokens."""
    if question.loop is not None:
        return replace(question, draws=())
    requests = list(question.workload.requests)
    before = [0, *accumulate(request.prompt_len + request.output_len for request in requests)]
    starts = range(max(len(requests) - MOST_ARRIVALS, 0) + 1)
    begin = max(starts, key=lambda start: before[min(start + MOST_ARRIVALS, len(requests))] - before[start])
    kept = requests[begin : begin + MOST_ARRIVALS]
    first_ns = kept[0].arrival_ns
    moved = [replace(request, arrival_ns=request.arrival_ns - first_ns) for request in kept]
    return replace(question, workload=only(question.workload, moved), requests=len(moved), draws=())
