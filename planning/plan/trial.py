"""One fleet on the traffic, simulated: the objectives that it meets, and its figures per user and per GPU.

Unless it must run to the end, a trial stops as soon as an objective is broken whatever later requests do. This saves
time, since most fleets that a search tries are too small, and small fleets are the slowest to simulate.

The throughput in steady operation follows from a simulation that begins and ends with an empty fleet. A fleet that
keeps up serves the offered traffic, so its throughput is that of the arrivals, however long the last answers take.
Requests that pile up before their first step are not served. If there are many of them, the throughput is measured over
the second half of the time in which requests arrive. Longer traffic of the same kind gives the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.calibration.steps.interval import StepInterval
from tokentwin.calibration.steps.observed import JudgedCost, ObservedOperations
from tokentwin.calibration.trust import Trust, least_certain
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.objectives import Objective, Objectives
from tokentwin.planning.traffic import clients_of, looped, with_clients
from tokentwin.planning.workers import mark
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.deployments.kv_layout import tables
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import PRIVATE, Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.fleet import PricedPool, alike_pools
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import FEWEST, PILING_UP, growth
from tokentwin.traces.reshape import reshaped
from tokentwin.traces.synth import SynthSpec

Floats = NDArray[np.float64]
_COLUMNS = ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Steady:
    """Tokens per second in steady operation.

    Attributes:
        keeps_up: True if less than a tenth of the arriving requests pile up
        piling_up_per_s: growth of the number of requests that wait for their first step, per second; 0 unless the 95 %
            interval of the growth lies above zero
        requests_per_s: mean rate at which requests arrive; None if all arrive at once
    """

    output_throughput: float
    input_throughput: float
    keeps_up: bool = True
    piling_up_per_s: float = 0.0
    requests_per_s: float | None = None


def steady(requests: pa.Table) -> Steady:
    """Return the figures of a run from its table of all requests, including unfinished ones.

    If there are too few requests to tell, the fleet counts as keeping up.
    """
    finished = np.asarray(pc.fill_null(pc.equal(requests.column("status"), "finished"), False))
    arrival, scheduled, first_token, finish, prompt, output = (_column(requests, name) for name in _COLUMNS)
    first_token = np.where(np.isnan(first_token), finish, first_token)  # a pooling request ends with its prompt
    begin, end = float(arrival.min()), float(arrival.max())
    if end <= begin:  # all arrive at once, so the only rate is that at which they finish
        spent_s = (float(finish[finished].max(initial=begin)) - begin) / 1e9
        out_s, in_s = (_over(float(tokens[finished].sum()), spent_s) for tokens in (output, prompt))
        return Steady(out_s, in_s)
    rate = (len(arrival) - 1) / ((end - begin) / 1e9)
    piling_up = _queue_growth(arrival, scheduled)
    out_s, in_s = ((rate - piling_up) * float(tokens[finished].sum()) / len(arrival) for tokens in (output, prompt))
    if piling_up < PILING_UP * rate:
        return Steady(out_s, in_s, keeps_up=True, piling_up_per_s=piling_up, requests_per_s=rate)
    half = (begin + end) / 2, end
    out_s = min(out_s, _tokens_within(half, first_token[finished], finish[finished], output[finished]))
    in_s = min(in_s, _tokens_within(half, scheduled[finished], first_token[finished], prompt[finished]))
    return Steady(out_s, in_s, keeps_up=False, piling_up_per_s=piling_up, requests_per_s=rate)


def _queue_growth(arrival: Floats, scheduled: Floats) -> float:
    """Return the growth per second of the number of requests that wait for their first step; 0 unless it is certain.

    Requests without a first step were rejected, and do not count as waiting.
    """
    admitted = np.isfinite(scheduled)
    if admitted.sum() < FEWEST:
        return 0.0
    trend = growth(np.sort(arrival[admitted]), np.sort(scheduled[admitted]))
    return trend.slope if trend.rises else 0.0


def _tokens_within(window: tuple[float, float], begin: Floats, end: Floats, tokens: Floats) -> float:
    """Return the tokens per second in `window`; a request's tokens are spread evenly from its `begin` to its `end`."""
    first, last = window
    inside = np.clip(np.minimum(end, last) - np.maximum(begin, first), 0.0, None)
    lasting = end > begin
    share = np.where(lasting, inside / np.where(lasting, end - begin, 1.0), (begin >= first) & (begin < last))
    return float((share * tokens).sum()) / ((last - first) / 1e9)


def _column(table: pa.Table, name: str) -> Floats:
    values: Floats = pc.cast(table.column(name), pa.float64(), safe=False).to_numpy()
    return values


def _over(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


# Shares of the cases in which steps take no longer: as predicted, and both ends of the 90 % interval.
LIKELY, FAST, SLOW = 0.5, 0.05, 0.95
_LOOKS, _LOOK_EVERY = 64, 32  # maximum number of checks for a broken objective; minimum number of requests between them
_SAMPLE = 2000  # number of requests in the sample of `try_alone`
_SURE = 4.0  # standard deviations that a sample is allowed beyond the share of requests that may break an objective


Pricing = Callable[[Engine], JudgedCost]  # returns a new cost model of an engine, which has timed no step yet


Trials = dict[tuple[str, int, float], "Trial"]  # by engine, replicas, and share of cases in which steps take no longer


@dataclass
class Runs:
    """The results of simulations, kept so that none is made twice; `about` holds the inputs that all of them share."""

    about: tuple[Any, ...] = ()
    known: Trials = field(default_factory=dict)

    def add(self, trials: Trials) -> None:
        """Add results; a run that went to its end replaces a run that was stopped early."""
        for key, trial in trials.items():
            if trial.figures is not None or key not in self.known:
                self.known[key] = trial


@dataclass(frozen=True)
class Question:
    """The inputs that all trials of a search share: the arrivals, the objectives, the step times, and the router.

    `risk` is the share of cases in which objectives may break. The cases differ in step times, which may be longer than
    predicted, and in the traffic, which may be any of the `draws`. With a `front_door`, times are those that
    clients see. `loop` is the specification of the workload if its clients wait for answers: more traffic is then more
    clients, not the same requests at a higher rate. `limit` is the number of requests of these clients that are used.
    """

    workload: Workload
    requests: int
    objectives: Objectives
    pricing: Pricing
    router: str
    risk: float
    draws: tuple[Workload, ...] = ()
    loop: SynthSpec | None = None
    limit: int | None = None
    front_door: FrontDoor | None = None
    runs: Runs = field(default_factory=Runs, repr=False, compare=False)

    @cached_property
    def demand(self) -> tuple[list[int], list[int]]:
        """Prompt tokens of each request that no cache can have, and output tokens after the first; both ascending."""
        requests = self.workload.requests
        prompts = (sum(tokens for key, tokens in request.prompt if key == PRIVATE) for request in requests)
        return sorted(prompts), sorted(max(request.output_len - 1, 0) for request in requests)

    def at_scale(self, scale: float) -> Question:
        """Return the question for `scale` times as much traffic."""
        if self.loop is None:
            return replace(self, workload=reshaped(self.workload, rate_scale=scale))
        return self.for_clients(max(round(scale * clients_of(self.loop)), 1))

    def for_clients(self, clients: int) -> Question:
        """Return the question for another number of clients who wait for answers; each sends as much as before."""
        assert self.loop is not None
        if clients == clients_of(self.loop):
            return self
        loop = with_clients(self.loop, clients)
        limit = None if self.limit is None else max(round(self.limit * clients / clients_of(self.loop)), 2)
        try:
            workload = looped(loop, limit=limit)
        except UserError:  # so few clients send nothing within the limit that counts
            workload = looped(loop)
        requests = sum(1 for _ in workload.requests)
        return replace(self, workload=workload, requests=requests, loop=loop, limit=limit, draws=())

    def __post_init__(self) -> None:
        about = (self.workload, self.objectives, self.pricing, self.router, self.front_door)
        if len(self.runs.about) != len(about) or any(a is not b for a, b in zip(self.runs.about, about, strict=True)):
            object.__setattr__(self, "runs", Runs(about))  # the inputs are different


@dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes:
        attainment: share of the requests that meet every bound
        steady: throughput and growth of the queue in steady operation
        tok_s_user: tokens/s of the median user
        e2e_p99_s, e2e_mean_s: 99th percentile and mean of E2E, in seconds
        observed: observed value of each objective, in the order of the objectives
        worst: index of the objective that is furthest beyond its bound, or nearest to it
        excess: factor by which the worst objective exceeds its bound; up to 1 if all objectives are met
        broken: share of the requests that break each bound of the attainment
        unfinished: number of requests that did not finish
        trust: trust in the step times of the run
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
    interval: StepInterval | None = None  # of the first pool's step times, if it depends on which steps were priced


@dataclass(frozen=True)
class Trial:
    """A trial of a number of replicas: they must meet all objectives and keep up with the traffic at the accepted risk.

    Attributes:
        replicas: number of replicas
        met: True if they passed
        figures: figures with step times as predicted; None if the run was stopped before its end
        broken: objective that broke before the run was stopped
        late: trial of the same fleet with steps as slow as the accepted risk demands, if these break an objective
    """

    replicas: int
    met: bool
    figures: Figures | None
    broken: Objective | None = None
    late: Trial | None = None

    @property
    def decisive(self) -> Trial:
        """The run that shows which objective breaks, if one does."""
        return self.late or self


class _Broken(Exception):
    """Raised when an objective cannot be met any more."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective


class _Watch:
    """A sink that keeps the requests, and stops the run as soon as an objective cannot be met any more."""

    def __init__(self, question: Question, to_the_end: bool) -> None:
        self._objectives = () if to_the_end else question.objectives.slos
        self._allowed = [objective.allowed(question.requests) for objective in self._objectives]
        self._misses = [0.0] * len(self._objectives)
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
        """Discard steps."""

    @property
    def counts(self) -> bool:
        """True if any request has counted."""
        return bool(self._tables)

    @property
    def requests(self) -> pa.Table:
        return pa.concat_tables(self._tables)


def try_fleet(question: Question, engine: Engine, replicas: int, to_the_end: bool = False) -> Trial:
    """Try `replicas` of `engine`, first with slow steps: a fleet that meets all objectives with them always does."""
    share, known = 1 - question.risk, question.runs.known
    if question.risk >= 0.5:
        return at_share(question, engine, replicas, LIKELY, to_the_end)
    narrow = None
    if not to_the_end and (engine.name, replicas, share) not in known:
        cost = question.pricing(engine)
        narrow = simulated(question, engine, cost.at_share(share), replicas)
        if not narrow.met:  # the interval of the steps that occur is at least as wide
            return narrow
    likely = at_share(question, engine, replicas, LIKELY, to_the_end)
    if not likely.met:
        return likely
    if narrow is not None and _same_interval(cost, likely):
        known[engine.name, replicas, share] = narrow
    late = at_share(question, engine, replicas, share, to_the_end)
    return likely if late.met else replace(likely, met=False, late=late)


def _same_interval(cost: JudgedCost, likely: Trial) -> bool:
    """Return True if the interval of step times is the same for the steps of the run `likely` as for unknown steps."""
    return not isinstance(cost, ObservedOperations) or (
        likely.figures is not None and likely.figures.interval == cost.interval
    )


def try_more(question: Question, engine: Engine, replicas: int) -> Trial:
    """Try more replicas than are enough, to the end and only as predicted, since slow steps broke nothing for fewer."""
    return at_share(question, engine, replicas, LIKELY, to_the_end=True)


def try_alone(question: Question, engine: Engine) -> Trial:
    """Try every request with a replica to itself, which is the best that any number of replicas can do.

    In the simulation one replica serves one request after another. It never evicts a prefix, because many replicas
    together might keep all. If requests share no prefix, a sample of them is enough if it breaks no objective, or if so
    many break one that all requests together would break it, too.
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

    If such an engine breaks an objective, the excess is within the uncertainty of its step times.
    """
    return at_share(*_alone(question, engine, sampled=True), 1, FAST, to_the_end=True).met


def at_share(question: Question, engine: Engine, replicas: int, share: float, to_the_end: bool = False) -> Trial:
    """Try `replicas` of `engine` with step times that are not exceeded in a `share` of the cases.

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
    """Return a cost model with step times that are not exceeded in a `share` of the cases.

    The uncertainty depends on the steps that occur; here it is that of a run with `replicas`. The cost model times the
    steps of `drawn_engine` if that is given, and has timed no step yet.
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
    if question.loop is not None:  # nobody waits for others, so think times do not matter
        first = next((r.id for r in requests if r.arrival_ns >= workload.warm_up_ns), 0)
        first = max(first, workload.warm_up_requests)  # what is cold at the start stays in the warm-up
        requests = [replace(request, think_ns=None) for request in requests]
        alone = replace(alone, requests=requests, warm_up_ns=0, warm_up_requests=first, until_ns=None)
    return replace(question, workload=alone, requests=len(requests), loop=None), engine


def _forgiving(some: Question) -> Question:
    """Return `some` with looser objectives, which a sample almost certainly meets if all requests meet the original."""

    def share(objective: Objective) -> Fraction:
        mine = objective.slo_class
        requests = sum(r.slo_class == mine for r in some.workload.requests) if mine else some.requests
        spread = math.sqrt(objective.share * (1 - objective.share) / max(requests, 1))
        return max(objective.share - Fraction(_SURE * spread), Fraction(0))

    slos = tuple(
        replace(objective, bounds=((objective.bounds[0][0], math.inf),))  # the spread of values is not known
        if objective.mean
        else replace(objective, share=share(objective))
        for objective in some.objectives.slos
    )
    return replace(some, objectives=replace(some.objectives, slos=slos))


def simulated(question: Question, engine: Engine, cost: JudgedCost, replicas: int, to_the_end: bool = False) -> Trial:
    """Simulate `replicas` of `engine` with the step times of `cost`."""
    fleet = engine.fleet(replicas, question.router)
    return simulated_fleet(question, fleet, alike_pools(fleet, engine.deployment, cost), replicas, to_the_end)


def simulated_fleet(
    question: Question, fleet: FleetConfig, pools: Sequence[PricedPool], replicas: int, to_the_end: bool = False
) -> Trial:
    """Simulate a fleet of `pools`, whose costs are `JudgedCost`s; `replicas` is the number that the trial states."""
    watch = _Watch(question, to_the_end)
    cluster = Cluster(
        pools[0].deployment,
        pools[0].cost,
        watch,
        fleet=fleet,
        pools=pools,
        shares_prefixes=question.workload.shares_prefixes,
        steps=False,
        block=max(question.requests // _LOOKS, _LOOK_EVERY),
        front_door=question.front_door,
    )
    try:
        cluster.run(question.workload)
    except _Broken as stopped:
        return Trial(replicas, False, None, stopped.objective)
    if not watch.counts:  # all clients wait for answers to requests of the warm-up
        everything = replace(question.workload, warm_up_ns=0, warm_up_requests=0)
        return simulated_fleet(replace(question, workload=everything), fleet, pools, replicas, to_the_end)
    requests = watch.requests
    metrics = RunMetrics(requests)
    objectives = question.objectives.slos
    verdicts = [objective.misses(metrics) for objective in objectives]
    met = all(o.allowed(counted) >= misses for o, (misses, counted) in zip(objectives, verdicts, strict=True))
    figures = _figures(metrics, steady(requests), question.objectives, [pool.cost for pool in pools])
    return Trial(replicas, met and figures.steady.keeps_up, figures)


def _figures(metrics: RunMetrics, steady: Steady, objectives: Objectives, costs: Sequence[CostModel]) -> Figures:
    interval = costs[0].interval if isinstance(costs[0], ObservedOperations) else None
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
        trust=least_certain(cost.trust() for cost in costs if isinstance(cost, JudgedCost)),
        interval=interval,
    )


def _never_forgetting(engine: Engine, workload: Workload) -> Engine:
    scheduler = engine.deployment.scheduler
    tokens = sum(request.prompt_len + request.output_len + scheduler.block_size for request in workload.requests)
    blocks = min(max(tables(scheduler) * (tokens // scheduler.block_size) + 2, scheduler.num_blocks), 10_000_000)
    return replace(engine, deployment=engine.deployment.rescheduled(num_blocks=blocks))
