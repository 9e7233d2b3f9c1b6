"""The capacity of each engine: its highest rate within the objectives, and the speed for users at lower rates.

Equal numbers of two kinds of GPU that serve the same traffic give equal tokens per second and GPU, even if their
capacities differ, so each engine is simulated up to its highest rate. The simulation uses the busiest stretch of the
traffic, slowed down or sped up, on as many replicas as fit into the recommended GPUs, because fewer replicas would not
even out bursts as the fleet does. Steps take as long as predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from planning.plan.bisection import Bisection
from planning.plan.candidates import Engine
from planning.plan.document import EngineCurve, RatePoint
from planning.plan.frontier import point
from planning.plan.trial import Question, Trial, simulated
from planning.traffic import mean_rate
from planning.workers import Task, Workers
from traces.reshape import only, reshaped

_REPLICAS, MOST_ARRIVALS = 16, 4000  # maximum numbers of replicas and of requests that are simulated
_LOADS = (0.15, 0.35, 0.6, 0.8)  # shares of the highest rate that are simulated, too
_FINEST = 1.05  # ratio of two neighbouring rates
_BEYOND = (2, 3, 5, 8)  # numbers of rates above the first that breaks an objective, which are tried, too
_LEAST, _RATES = 1e-3, 200  # lowest rate as a share of the traffic's; number of rates, up to 17 times the traffic's


def engine_curves(workers: Workers[Question], engines: Sequence[Engine], gpus: int) -> list[EngineCurve]:
    """Return a curve for each engine, in the given order, for the replicas that fit into `gpus`, up to `_REPLICAS`.

    A curve has no points if the replicas meet the objectives at no rate.
    """
    tasks: list[Task[Question, EngineCurve]] = [
        partial(_curve, engine=engine, replicas=max(min(gpus // engine.gpus, _REPLICAS), 1)) for engine in engines
    ]
    return workers.run(tasks)


def _curve(question: Question, engine: Engine, replicas: int) -> EngineCurve:
    some = _busiest(question)

    def trial_at(scale: float, to_the_end: bool) -> Trial:
        workload = reshaped(some.workload, rate_scale=scale)
        asked = replace(some, workload=workload)
        return simulated(asked, engine, asked.pricing(engine), replicas, to_the_end)

    search = Bisection(low=0, most=_RATES, start=_RATES // 2)
    while not search.done:
        number = search.ask()
        search = search.answered(number, not trial_at(_LEAST * _FINEST**number, to_the_end=False).met)
    # Near the limit, chance may break an objective at one rate and not at a higher one.
    beyond = (search.low + more for more in _BEYOND)
    met = (number for number in beyond if search.low and trial_at(_LEAST * _FINEST**number, to_the_end=False).met)
    highest = _LEAST * _FINEST ** max(met, default=search.low)
    points = []
    for load in (*_LOADS, 1.0) if search.low else ():
        trial = trial_at(load * highest, to_the_end=True)
        rate = load * highest * mean_rate(some.workload) / replicas
        assert trial.figures is not None
        at_a_time = rate * trial.figures.e2e_mean_s  # Little's law
        points.append(RatePoint(**dict(point(engine, trial)), requests_per_s=rate, concurrency=at_a_time))
    return EngineCurve(engine=engine.name, gpu=engine.gpu, points=tuple(points))


def _busiest(question: Question) -> Question:
    """Return `question` with the stretch of up to `MOST_ARRIVALS` consecutive requests that has the most tokens."""
    requests = list(question.workload.requests)
    before = [0, *accumulate(request.prompt_len + request.output_len for request in requests)]
    starts = range(max(len(requests) - MOST_ARRIVALS, 0) + 1)
    begin = max(starts, key=lambda start: before[min(start + MOST_ARRIVALS, len(requests))] - before[start])
    kept = requests[begin : begin + MOST_ARRIVALS]
    first_ns = kept[0].arrival_ns
    moved = [replace(request, arrival_ns=request.arrival_ns - first_ns) for request in kept]
    return replace(question, workload=only(question.workload, moved), requests=len(moved), draws=())
