"""The function that answers a plan request: the traffic, the candidates, the search, and the curves around the answer.

The workers of a plan share their results, so that no simulation is made twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import Any

from tokentwin.planning.learn.front_door import learnt_front_door
from tokentwin.planning.made_up import assumed
from tokentwin.planning.plan.answer import plan_document, with_curves
from tokentwin.planning.plan.curves import AROUND, LOAD, engines_work
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.draws import drawn, drawn_again, reordered
from tokentwin.planning.plan.energy import Site, check_power_known, energy_section, with_energy
from tokentwin.planning.plan.first_answer import first_answer
from tokentwin.planning.plan.mixed_answer import with_mixed_fleets
from tokentwin.planning.plan.mixes import lengths_to_try
from tokentwin.planning.plan.next_measurement import next_measurement
from tokentwin.planning.plan.objectives import Objectives, parse_objectives
from tokentwin.planning.plan.omissions import Omissions
from tokentwin.planning.plan.plan import Limits, Plan, make_plan
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.sentences import first_answer as first_answer_text
from tokentwin.planning.plan.trial import Pricing, Question, Trials
from tokentwin.planning.pooling import check_pooling
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.traffic import looped
from tokentwin.planning.workers import Answer, Task, Workers
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.sim.router import find_router

OnDocument = Callable[[PlanDocument], None]


class Planners(Workers[Question]):
    """Workers of a plan. Each task gets the simulation results of all batches of tasks before its own."""

    def run(self, tasks: Sequence[Task[Question, Answer]]) -> list[Answer]:
        """Run the tasks as `Workers` does."""
        known = dict(self.common.runs.known)
        answers = super().run([partial(_with_new_trials, task=task, known=known) for task in tasks])
        for _, trials in answers:
            self.common.runs.add(trials)
        return [answer for answer, _ in answers]


def _with_new_trials(question: Question, task: Task[Question, Answer], known: Trials) -> tuple[Answer, Trials]:
    """Return the answer of a task, and the simulation results of the task that were not `known`."""
    runs = question.runs
    runs.add(known)
    answer = task(question)
    return answer, {key: trial for key, trial in runs.known.items() if known.get(key) is not trial}


_OF_A_CANDIDATE, _OF_THE_ANSWER = 1, 50  # numbers of whole simulations; most of a candidate's are stopped early
_REQUEST_S = 8e-5  # CPU time to simulate a request of docs/plan.md on an AMD EPYC; compiled core, 2026-11-23
_LEAST = 0.5  # minimum number of simulations that count as left until all are done
_TOLD = 0.1  # number of simulations between two reports
_UNTOLD = 0.1  # share of the simulations that must be done before the time left is estimated


def plan(
    request: PlanRequest,
    *,
    jobs: int | None = None,
    surroundings: bool = True,
    say: Callable[[str], None] | None = None,
    on_answer: OnDocument = lambda document: None,
    on_tables: OnDocument = lambda document: None,
    tell: Tell = quiet,
) -> PlanDocument:
    """Return the cheapest fleet that meets the objectives of `request`. Raises UserError for impossible requests.

    Args:
        jobs: number of simulations at a time; by default one for each CPU
        surroundings: True to also simulate more and fewer replicas, and more and less traffic, for the document
        say: called with a line about the search, and within seconds with the range of the answer (`first_answer`)
        on_answer: called with the document as soon as the fleet is known, without any part around it
        on_tables: called with the document when it lacks nothing but curves, if there will be any

    A part around the answer that fails is left out, and the document says so.
    """
    objectives = parse_objectives(request.slos)
    find_router(request.router)
    workload = request.workload(at_named_rate=True)
    engines, ruled_out, pricing = priced_candidates(request, workload)
    engines = [replace(engine, counts_gpus=request.rank_by == "gpus") for engine in engines]
    check_pooling(workload, (engine.deployment.model for engine in engines), objectives.metrics)
    question = questioned(request, workload, objectives, pricing)
    requests = question.requests
    if request.asks_energy:
        check_power_known(engines)
    if request.mix is not None:
        lengths_to_try(request.mix, question)
    if request.spot and any(engine.deployment.data_parallel_size > 1 for engine in engines):
        raise UserError("spot", ", ".join(request.spot), "cannot be combined with data_parallel_size; leave one out")
    site = Site(request.pue or 1.0, request.grid_gco2_per_kwh)
    limits, pace = Limits(request.max_replicas, request.spares), _Pace(tell)
    candidates = "one candidate" if len(engines) == 1 else f"{len(engines)} candidates"
    searching = f"searching {candidates} on {question.requests:,} requests"
    draws = cache(lambda: tuple(other_draws(request, workload)))
    omissions = Omissions()
    if say is not None and engines:
        say(searching)
        tell("a first answer", 0.0)
        omissions.part(
            "a first answer", lambda: say(first_answer_text(first_answer(question, engines, limits, draws))), None
        )
    question = replace(question, draws=draws())
    around = AROUND + LOAD + engines_work(len(engines), requests)
    curves = around if surroundings else 0.0

    def documented(plan: Plan) -> PlanDocument:
        made = plan_document(plan, engines, request.as_json())
        return made.model_copy(update={"assumed": assumed(request.traffic)})

    def with_omissions(made: PlanDocument) -> PlanDocument:
        return made.model_copy(update={"omitted": tuple(omissions.lines)})

    with Planners(question, jobs, lambda simulated: pace.did(simulated / requests)) as workers:
        answer = make_plan(
            workers,
            engines,
            ruled_out,
            limits,
            lambda left: pace.expect(searching, left + curves),
            lambda plan: on_answer(with_omissions(documented(plan))),
            omissions,
        )
        if request.asks_energy:
            answer = omissions.part("energy", partial(with_energy, workers, answer, engines, site), answer)
        document = documented(answer)
        best, shown = answer.recommendation, document.recommendation
        if best and shown:
            advice = partial(next_measurement, question.pricing, best.offer, question.workload)
            more: dict[str, Any] = {"next_measurement": omissions.part("what to measure next", advice, None)}
            if request.asks_energy:
                more["energy"] = energy_section(best.offer.point, best.offer.engine, site)
            document = document.model_copy(update={"recommendation": shown.model_copy(update=more)})
        if request.asks_mixed_fleets:
            pace.expect("mixed fleets", around)
            mixed = partial(with_mixed_fleets, document, workers, answer, engines, request)
            document = omissions.part("mixed fleets", mixed, document)
        if surroundings:
            on_tables(with_omissions(document))
            document = with_curves(document, workers, answer, engines, omissions, pace.expect)
        return with_omissions(document)


def questioned(request: PlanRequest, workload: Workload, objectives: Objectives, pricing: Pricing) -> Question:
    """Return the question of a request about `workload`.

    Raises UserError for an objective of a class without requests.
    """
    requests = sum(1 for _ in workload.requests)
    for objective in objectives.slos:
        objective.check_class({r.slo_class for r in workload.requests} if objective.slo_class else ())
    question = Question(
        workload, requests, objectives, pricing, request.router, request.risk, loop=request.loop, limit=request.limit
    )
    if (door := learnt_front_door(request.calibration)) is not None:
        question = replace(question, front_door=door.without_queue())
    return question


def expected_s(requests: float, candidates: int) -> float:
    """Return the approximate duration of `plan` in seconds, before it begins."""
    simulations = _OF_THE_ANSWER + _OF_A_CANDIDATE * candidates + AROUND + LOAD + engines_work(candidates, requests)
    return requests * simulations * _REQUEST_S / len(os.sched_getaffinity(0))


def other_draws(request: PlanRequest, planned: Workload) -> list[Workload]:
    """Return other draws of the request's traffic; for a trace, the same requests in another order."""
    if (loop := request.loop) is not None:
        return drawn(lambda number: looped(loop, number, request.limit))
    if request.recorded:
        return drawn_again(planned, reordered(planned))
    return drawn_again(planned, lambda number: request.workload(number, at_named_rate=True))


class _Pace:
    """The share of the work that is done, by time; later simulations are assumed to take as long as the earlier ones.

    A simulation under way counts by the share of its requests that it has finished. The reported share is 0 until
    enough simulations are done.
    """

    def __init__(self, tell: Tell, now_s: Callable[[], float] = perf_counter) -> None:
        self._tell, self._now_s, self._began = tell, now_s, now_s()
        self._simulating: float | None = None
        self._stage, self._share, self._done, self._left, self._said = "", 0.0, 0.0, 0.0, 0.0

    def expect(self, stage: str, left: float) -> None:
        """Take note that about `left` simulations of the whole traffic are still to be done."""
        self._stage, self._left = stage, left
        if self._simulating is None:
            self._simulating = self._now_s()
        self._say()

    def did(self, simulations: float) -> None:
        """Take note that `simulations` more simulations are done."""
        self._done += simulations
        self._left = max(self._left - simulations, _LEAST)
        if self._done >= self._said + _TOLD:
            self._say()

    def _say(self) -> None:
        now, self._said = self._now_s(), self._done
        if self._simulating is not None and self._done > _UNTOLD * (self._done + self._left):
            left_s = (now - self._simulating) / self._done * self._left
            self._share = max(self._share, (now - self._began) / (now - self._began + left_s))
        self._tell(self._stage, self._share)
