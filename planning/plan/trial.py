"""One fleet on the traffic, simulated: the objectives that it meets, and its figures per user and per GPU.

A trial stops as soon as an objective is broken whatever the requests still to come do, unless it has to go on: most
fleets that a search looks at are too small, and small fleets are the slowest to simulate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import pyarrow as pa

from calibration.steps.interval import StepInterval
from calibration.steps.observed import JudgedCost, ObservedOperations
from calibration.trust import Trust
from planning.plan.candidates import Engine
from planning.plan.objectives import Objective, Objectives
from planning.plan.steady import Steady, steady
from planning.workers import mark
from serving.workload import PRIVATE, Workload
from sim.cluster import Cluster
from sim.run_log import TableSink
from traces.run_metrics import RunMetrics

LIKELY, FAST, SLOW = 0.5, 0.05, 0.95  # shares of the cases in which steps take no longer: predicted, and both ends
_LOOKS, _LOOK_EVERY = 64, 32  # checks for a broken objective: how many, and after how many requests at least
_SAMPLE = 2000  # requests in the sample for requests that have a replica to themselves
_SURE = 4.0  # standard deviations by which more of a sample break an objective than may of all


Pricing = Callable[[Engine], JudgedCost]  # times the steps of an engine; a new cost has timed no step yet


Trials = dict[tuple[str, int, float], "Trial"]  # by engine, replicas, and share of cases in which steps take no longer


@dataclass
class Runs:
    """The results of simulations, so that none is made twice; `about` is what all of them have in common."""

    about: tuple[Any, ...] = ()
    known: Trials = field(default_factory=dict)

    def add(self, trials: Trials) -> None:
        """Add the results of others; a run that went to its end replaces one that was stopped."""
        for key, trial in trials.items():
            if trial.figures is not None or key not in self.known:
                self.known[key] = trial


@dataclass(frozen=True)
class Question:
    """The question that every trial of a search shares: the same arrivals, objectives, prices of steps, and router.

    `risk` is the share of cases in which objectives may break: steps may take longer than predicted, and the traffic
    may be another of the `draws`.
    """

    workload: Workload
    requests: int
    objectives: Objectives
    pricing: Pricing
    router: str
    risk: float
    draws: tuple[Workload, ...] = ()
    runs: Runs = field(default_factory=Runs, repr=False, compare=False)

    @cached_property
    def demand(self) -> tuple[list[int], list[int]]:
        """Tokens to compute of each prompt, without cache hits, and of each answer after its first token; ascending."""
        requests = self.workload.requests
        prompts = (sum(tokens for key, tokens in request.prompt if key == PRIVATE) for request in requests)
        return sorted(prompts), sorted(request.output_len - 1 for request in requests)

    def __post_init__(self) -> None:
        about = (self.workload, self.objectives, self.pricing, self.router)
        if len(self.runs.about) != len(about) or any(a is not b for a, b in zip(self.runs.about, about, strict=True)):
            object.__setattr__(self, "runs", Runs(about))  # a question about something else


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    They are attainment, median tokens/s of a user, and 99th percentile and mean of E2E; and in steady operation output
    and prompt tokens/s in all, and the growth of the queue in requests a second.

    `observed` has one number for each objective, in their order; `worst` is the one furthest beyond its bound, and
    `excess` the factor by which it is (below 1: none is). `broken` has, for each bound that attainment counts, the
    share of requests that break it. `trust` is that in the times of its steps.
    """

    attainment: float
    steady: Steady
    tok_s_user: float
    e2e_p99_s: float
    e2e_mean_s: float
    observed: tuple[float, ...]
    worst: int
    excess: float
    broken: tuple[float, ...]
    unfinished: int
    trust: Trust
    interval: StepInterval | None = None  # interval of step times, if it depends on which steps were priced


@dataclass(frozen=True)
class Trial:
    """A test of a number of replicas: they must meet all objectives and keep up with the traffic, at the risk taken.

    Figures are at the centre of the interval of step times. A run that was stopped before its end has none, but the
    objective that was `broken` by then. `late` is the same fleet with steps as slow as the risk makes it take into
    account, if they break an objective.
    """

    replicas: int
    met: bool
    figures: Figures | None
    broken: Objective | None = None
    late: Trial | None = None

    @property
    def decisive(self) -> Trial:
        """The run that shows what breaks, if anything does."""
        return self.late or self


class _Broken(Exception):
    """An objective cannot be met any more."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective


class _Watch:
    """A sink that keeps the requests, and stops the run when it has seen enough of them to know the result."""

    def __init__(self, question: Question, to_the_end: bool) -> None:
        self._objectives = () if to_the_end else question.objectives.slos
        self._allowed = [objective.allowed(question.requests) for objective in self._objectives]
        self._misses = [0] * len(self._objectives)
        self._tables: list[pa.Table] = []

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        block = TableSink()
        block.add_requests(columns)
        self._tables.append(block.requests)
        mark(block.requests.num_rows)
        seen = RunMetrics(block.requests)
        for at, objective in enumerate(self._objectives):
            self._misses[at] += objective.misses(seen)[0]
            if self._misses[at] > self._allowed[at]:
                raise _Broken(objective)

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Keep no steps."""

    @property
    def requests(self) -> pa.Table:
        return pa.concat_tables(self._tables)


def try_fleet(question: Question, engine: Engine, replicas: int, to_the_end: bool = False) -> Trial:
    """Try `replicas` of `engine`. Slow steps come first: a fleet that meets all objectives with them always does."""
    share, known = 1 - question.risk, question.runs.known
    if question.risk >= 0.5:
        return at_share(question, engine, replicas, LIKELY, to_the_end)
    narrow = None
    if not to_the_end and (engine.name, replicas, share) not in known:
        cost = question.pricing(engine)
        narrow = simulated(question, engine, cost.at_share(share), replicas)
        if not narrow.met:  # the interval of the steps that it asks for is no narrower
            return narrow
    likely = at_share(question, engine, replicas, LIKELY, to_the_end)
    if not likely.met:
        return likely
    if narrow is not None and _same_interval(cost, likely):
        known[engine.name, replicas, share] = narrow
    late = at_share(question, engine, replicas, share, to_the_end)
    return likely if late.met else replace(likely, met=False, late=late)


def _same_interval(cost: JudgedCost, likely: Trial) -> bool:
    """Return True if steps like those of a whole run are as certain as steps of which nothing is known."""
    return not isinstance(cost, ObservedOperations) or (
        likely.figures is not None and likely.figures.interval == cost.interval
    )


def try_more(question: Question, engine: Engine, replicas: int) -> Trial:
    """Try more replicas than are enough, to the end: only as predicted, since slow steps break nothing for fewer."""
    return at_share(question, engine, replicas, LIKELY, to_the_end=True)


def try_alone(question: Question, engine: Engine) -> Trial:
    """Try every request with a replica to itself: the best that any number of replicas can do.

    One replica serves one request after another. It never forgets a prefix, as many replicas might not. If requests
    share none, a sample of them is enough if it breaks no objective, or so many break one that all would.
    """
    some, alone = _alone(question, engine, sampled=True)
    trial = try_fleet(some, alone, 1, to_the_end=True)
    figures = trial.decisive.figures
    if trial.met or some.requests == question.requests:
        return trial
    if figures is not None and not figures.unfinished and not try_fleet(_forgiving(some), alone, 1).met:
        return trial
    return try_fleet(*_alone(question, engine), 1, to_the_end=True)


def nearly_alone(question: Question, engine: Engine) -> bool:
    """Return True if `try_alone` meets all objectives at the fast end of the 90 % interval of step times.

    An engine that breaks one then does so by less than the uncertainty of its step times.
    """
    return at_share(*_alone(question, engine, sampled=True), 1, FAST, to_the_end=True).met


def at_share(question: Question, engine: Engine, replicas: int, share: float, to_the_end: bool = False) -> Trial:
    """Try `replicas` of `engine`, with step times that are not exceeded in that `share` of the cases.

    Known results are not simulated again.
    """
    known, key = question.runs.known, (engine.name, replicas, share)
    if key not in known or (to_the_end and known[key].figures is None):
        cost = cost_at(question, engine, replicas, share)
        known[key] = simulated(question, engine, cost, replicas, to_the_end)
    return known[key]


def cost_at(
    question: Question, engine: Engine, replicas: int, share: float, drawn_engine: Engine | None = None
) -> JudgedCost:
    """Return the cost model for steps like those of `replicas` replicas, at that `share` of the cases.

    The steps decide how certain the model is. It times steps of `drawn_engine`, if that is another engine, and has
    timed no step yet.
    """
    cost = question.pricing(drawn_engine or engine)
    if share == LIKELY:
        return cost
    likely = at_share(question, engine, replicas, LIKELY, to_the_end=True)
    if isinstance(cost, ObservedOperations) and likely.figures is not None:
        cost.known_interval = likely.figures.interval
    return cost.at_share(share)


def _alone(question: Question, engine: Engine, sampled: bool = False) -> tuple[Question, Engine]:
    workload = question.workload
    requests = list(workload.requests)
    if workload.shares_prefixes:
        engine = _never_forgetting(engine, workload)
    elif sampled:
        requests = requests[:: max(len(requests) // _SAMPLE, 1)]
    alone = replace(workload, requests=requests, concurrency=1)
    return replace(question, workload=alone, requests=len(requests)), engine


def _forgiving(some: Question) -> Question:
    """Return the question that a sample meets if all requests do, whichever are in it."""

    def share(objective: Objective) -> Fraction:
        spread = math.sqrt(objective.share * (1 - objective.share) / some.requests)
        return max(objective.share - Fraction(_SURE * spread), Fraction(0))

    slos = tuple(replace(objective, share=share(objective)) for objective in some.objectives.slos)
    return replace(some, objectives=replace(some.objectives, slos=slos))


def simulated(question: Question, engine: Engine, cost: JudgedCost, replicas: int, to_the_end: bool = False) -> Trial:
    """Simulate `replicas` of `engine`, their steps timed by `cost`."""
    watch = _Watch(question, to_the_end)
    cluster = Cluster(
        engine.deployment,
        cost,
        watch,
        fleet=engine.fleet(replicas, question.router),
        shares_prefixes=question.workload.shares_prefixes,
        steps=False,
        block=max(question.requests // _LOOKS, _LOOK_EVERY),
    )
    try:
        cluster.run(question.workload)
    except _Broken as stopped:
        return Trial(replicas, False, None, stopped.objective)
    requests = watch.requests
    metrics = RunMetrics(requests)
    objectives = question.objectives.slos
    verdicts = [objective.misses(metrics) for objective in objectives]
    met = all(o.allowed(counted) >= misses for o, (misses, counted) in zip(objectives, verdicts, strict=True))
    figures = _figures(metrics, steady(requests), question.objectives, cost)
    return Trial(replicas, met and figures.steady.keeps_up, figures)


def _figures(metrics: RunMetrics, steady: Steady, objectives: Objectives, cost: JudgedCost) -> Figures:
    interval = cost.interval if isinstance(cost, ObservedOperations) else None
    observed = tuple(objective.observed(metrics) for objective in objectives.slos)
    excess = [objective.excess(value) for objective, value in zip(objectives.slos, observed, strict=True)]
    return Figures(
        attainment=objectives.attainment(metrics),
        steady=steady,
        tok_s_user=metrics.distribution("tok_s_user").p50,
        e2e_p99_s=metrics.distribution("e2e_ms").p99 / 1e3,
        e2e_mean_s=metrics.distribution("e2e_ms").mean / 1e3,
        observed=observed,
        worst=max(range(len(excess)), key=excess.__getitem__),
        excess=max(excess),
        broken=objectives.broken(metrics),
        unfinished=int((~metrics.finished).sum()),
        trust=cost.trust(),
        interval=interval,
    )


def _never_forgetting(engine: Engine, workload: Workload) -> Engine:
    scheduler = engine.deployment.scheduler
    tokens = sum(request.prompt_len + request.output_len + scheduler.block_size for request in workload.requests)
    tables = max(len(scheduler.kv_groups), 1)
    blocks = min(max(tables * (tokens // scheduler.block_size) + 2, scheduler.num_blocks), 10_000_000)
    return replace(engine, deployment=engine.deployment.rescheduled(num_blocks=blocks))
