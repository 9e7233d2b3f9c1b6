"""Fleets of two kinds of engines: one serves the prompts up to a length, the other the longer ones.

The kinds are sized apart first. Prompts up to the length are one traffic, longer ones another, and for each the search
finds the two cheapest kinds and their fewest replicas. Then whole fleets of the two cheapest pairs of different kinds,
with about these numbers, are simulated, the cheapest first, until one meets the objectives with the accepted risk on
all requests together. What must cost half as much again as the best fleet of a single kind is not tried. Requests that
wait for answers are divided as they arrive at the best fleet of a single kind; the whole fleets are simulated with
clients who wait. All kinds are assumed to be slower or faster than predicted together. The idea to serve each size of
request where it is cheapest is that of Mélange (https://arxiv.org/abs/2404.14527), which solves an integer program over
measured throughputs instead of simulating.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from statistics import NormalDist, quantiles
from typing import Any, NamedTuple

from tokentwin.calibration.steps.interval import StepInterval
from tokentwin.calibration.steps.observed import JudgedCost, ObservedOperations
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import SURE
from tokentwin.planning.plan.draws import on_draw
from tokentwin.planning.plan.search import search
from tokentwin.planning.plan.sensitivity import last_to_hold
from tokentwin.planning.plan.trial import LIKELY, Question, Trial, simulated_fleet
from tokentwin.planning.plan.worth import Probabilities
from tokentwin.planning.traffic import waits_for_answers
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, RouterConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.fleet import PricedPool
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.reshape import only

SEARCHED = (50, 75, 90)  # percentiles of the prompt's length at which `search` divides the traffic
_FEWEST = 20  # minimum number of requests on each side
_KINDS, _PAIRS = 2, 2  # numbers of kinds for each side, and of pairs of kinds, that are tried
_DEAREST = 1.5  # factor over the price of the best fleet of a single kind, beyond which no mix is tried
_ROUNDING = 1e-9
Intervals = dict[str, StepInterval]  # the interval of step times by engine, if it depends on which steps were timed


class SizedPool(NamedTuple):
    """A number of replicas of an engine for the prompts up to a length; None: for all others."""

    engine: Engine
    replicas: int
    max_prompt_tokens: int | None = None


@dataclass(frozen=True)
class Mix:
    """Pools of engines behind one router."""

    pools: tuple[SizedPool, ...]

    @property
    def weight(self) -> tuple[float, float]:
        """The dollars an hour, or the GPUs and the dollars."""
        usd = sum(pool.replicas * pool.engine.usd_per_hour for pool in self.pools)
        return sum(pool.replicas * pool.engine.weight for pool in self.pools), usd

    def fleet(self, router: str) -> FleetConfig:
        """Return the fleet, with a pool for each kind and the settings in which they differ from the last pool."""
        base = settings_of(self.pools[-1].engine)
        pools = [
            PoolConfig(
                name="short" if pool.max_prompt_tokens else "long",
                replicas=pool.replicas,
                gpu=pool.engine.gpu,
                deployment=changes(base, settings_of(pool.engine)),
                max_prompt_tokens=pool.max_prompt_tokens,
            )
            for pool in self.pools
        ]
        return FleetConfig(pools=tuple(pools), router=RouterConfig(name=router))

    def deployment(self, router: str) -> dict[str, Any]:
        """Return the deployment with this fleet, as in a YAML file."""
        fleet = self.fleet(router).model_dump(mode="json", exclude_defaults=True)
        return {**settings_of(self.pools[-1].engine), "fleet": fleet}


class SizedMix(NamedTuple):
    """A mix that meets the objectives, its run with steps as predicted, and the probability that it meets them."""

    mix: Mix
    trial: Trial
    probabilities: Probabilities


def settings_of(engine: Engine) -> dict[str, Any]:
    """Return the settings of one replica; KV blocks that came from memory come from it again."""
    settings = engine.deployment.model_dump(mode="json", exclude={"fleet"})
    if engine.deployment.gpu_memory_utilization is not None:
        settings["scheduler"].pop("num_blocks", None)
    return settings


def changes(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that turn `base` into `other`, nested in the same way."""
    result = {}
    for name, value in other.items():
        known = base.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and value != known:
            result[name] = changes(known, value)
        elif value != known:
            result[name] = value
    return result


def lengths_to_try(texts: Sequence[str], question: Question) -> list[int]:
    """Return the prompt lengths at which the traffic is divided; `search` means percentiles of the traffic's lengths.

    Raises UserError if no length has enough requests on both sides.
    """
    prompts = [request.prompt_len for request in question.workload.requests]
    hundredths = quantiles(prompts, n=100, method="inclusive")
    lengths = {round(hundredths[p - 1]) for p in SEARCHED} if "search" in texts else set()
    lengths |= {int(text) for text in texts if text != "search"}
    able = [at for at in sorted(lengths) if _FEWEST <= sum(p <= at for p in prompts) <= len(prompts) - _FEWEST]
    if not able:
        shown = ",".join(map(str, sorted(lengths)))
        remedy = f"leaves fewer than {_FEWEST} prompts on one side; prompts have {min(prompts):,} to {max(prompts):,}"
        raise UserError("mix", shown, f"{remedy} tokens")
    return able


def mixes(
    workers: Workers[Question],
    engines: Sequence[Engine],
    lengths: Sequence[int],
    most: int,
    single: tuple[Engine, int] | None = None,
) -> list[SizedMix]:
    """Return the cheapest mix for each of the `lengths` for which there is one, with up to `most` replicas a kind.

    `single` is the best fleet of a single kind; None: no such fleet meets the objectives.
    """
    able = [engine for engine in engines if engine.split is None]
    if not able:
        return []
    cap = math.inf if single is None else _DEAREST * single[1] * single[0].weight
    known = single or (able[0], most)
    tasks = [partial(_sized, engines=able, at=at, most=most, single=known, cap=cap) for at in lengths]
    return [mix for mix in workers.run(tasks) if mix is not None]


def _as_they_arrive(question: Question, engine: Engine, replicas: int) -> Question:
    """Return the question with the arrivals of requests at a fleet, if they wait for answers there."""
    if not waits_for_answers(question.workload):
        return question
    fleet, sink = engine.fleet(replicas, question.router), TableSink()
    cost = question.pricing(engine)
    cluster = Cluster(engine.deployment, cost, sink, fleet=fleet, steps=False, front_door=question.front_door)
    workload = replace(question.workload, warm_up_ns=0, warm_up_requests=0)
    cluster.run(workload)
    rows = sink.requests.select(["request_id", "arrival_ns"]).to_pylist()
    arrived = {row["request_id"]: row["arrival_ns"] for row in rows}
    known = (request for request in workload.requests if request.id in arrived)
    requests = [replace(request, arrival_ns=arrived[request.id], think_ns=None) for request in known]
    requests.sort(key=lambda request: (request.arrival_ns, request.id))
    counted = question.workload
    alone = Workload(
        requests,
        shares_prefixes=counted.shares_prefixes,
        warm_up_ns=counted.warm_up_ns,
        warm_up_requests=counted.warm_up_requests,
    )
    return replace(question, workload=alone, requests=len(requests), loop=None)


def _sized(
    question: Question, engines: Sequence[Engine], at: int, most: int, single: tuple[Engine, int], cap: float
) -> SizedMix | None:
    """Return the cheapest mix that divides the prompts at one length; None if no mix meets the objectives."""
    apart = _as_they_arrive(question, *single)
    shorts, longs = (_fewest(apart, longer, at, engines, most, cap) for longer in (False, True))
    pairs = [(short, long) for short, long in product(shorts, longs) if short[0].name != long[0].name]
    pairs.sort(key=lambda pair: sum(replicas * engine.weight for engine, replicas in pair))
    tried = [
        Mix((SizedPool(short, some, at), SizedPool(long, others)))
        for (short, low), (long, high) in pairs[:_PAIRS]
        for some, others in product(_around(low, most), _around(high, most))
    ]
    for mix in sorted((mix for mix in tried if mix.weight[0] <= cap), key=lambda mix: mix.weight):
        likely, intervals = _as_predicted(question, mix)
        known = {round(100 * LIKELY): likely}
        if likely.met and question.risk < 1 - LIKELY:
            late = _at_share(question, mix, intervals, 1 - question.risk)
            known[round(100 * (1 - question.risk))] = _tried(question, mix, late)
        if not all(trial.met for trial in known.values()):
            continue
        if (probabilities := _likely_enough(question, mix, intervals, known)) is not None:
            return SizedMix(mix, likely, probabilities)
    return None


def _likely_enough(question: Question, mix: Mix, intervals: Intervals, known: dict[int, Trial]) -> Probabilities | None:
    """Return the probabilities that a mix meets the objectives; None if it is soon clear that they are too small.

    `known` are trials of the planned traffic, by percent of the cases in which steps are faster.
    """
    probabilities = Probabilities(_holding(question, mix, intervals, known))
    for draw in range(len(question.draws)):
        if probabilities.planned is None:
            return probabilities
        there = _holding(*_drawn(question, mix, draw), intervals, {})
        probabilities = probabilities._replace(draws=(*probabilities.draws, there or 0.0))
        left = len(question.draws) - draw - 1
        at_best = probabilities._replace(draws=(*probabilities.draws, *[SURE] * left))
        if (at_best.mean or 0.0) < 1 - question.risk - _ROUNDING:
            return None
    return probabilities


def _around(replicas: int, most: int) -> range:
    """Return the numbers of replicas to try: a part of a fleet may need a few less than by itself, or more."""
    few = max(replicas // 8, 1)
    return range(max(replicas - few, 1), min(replicas + few + 1, most) + 1)


def _part(question: Question, longer: bool, at: int, all_misses: bool) -> Question:
    """Return the question for the prompts of up to `at` tokens, or for the longer ones.

    As many of them may break an objective as of all requests together, if `all_misses` is set.
    """
    requests = [request for request in question.workload.requests if (request.prompt_len > at) == longer]
    more = Fraction(question.requests, max(len(requests), 1)) if all_misses else Fraction(1)
    slos = tuple(
        replace(objective, share=max(1 - (1 - objective.share) * more, Fraction(0)))
        for objective in question.objectives.slos
    )
    objectives = replace(question.objectives, slos=slos)
    workload = only(question.workload, requests)
    return replace(question, workload=workload, requests=len(requests), objectives=objectives, draws=())


def _fewest(
    question: Question, longer: bool, at: int, engines: Sequence[Engine], most: int, cap: float
) -> list[tuple[Engine, int]]:
    """Return the cheapest kinds for a part of the traffic, each with its fewest replicas; empty if none can serve it.

    If no kind meets the objectives for this part alone, the part may have all misses of the whole fleet.
    """
    for all_misses in (False, True):
        with Workers(_part(question, longer, at, all_misses), jobs=1) as workers:
            searched = search(workers, engines, most, keep=_KINDS, cap=cap)
        sized = [(entry.engine, entry.replicas) for entry in searched if entry.replicas is not None]
        if sized:
            return sorted(sized, key=lambda one: (one[1] * one[0].weight, one[1] * one[0].usd_per_hour))[:_KINDS]
    return []


def _as_predicted(question: Question, mix: Mix) -> tuple[Trial, Intervals]:
    """Return the trial with steps as predicted, and the intervals of the steps that occurred."""
    costs = [question.pricing(pool.engine) for pool in mix.pools]
    trial = _tried(question, mix, costs)
    timed = zip(mix.pools, costs, strict=True)
    return trial, {pool.engine.name: cost.interval for pool, cost in timed if isinstance(cost, ObservedOperations)}


def _at_share(question: Question, mix: Mix, intervals: Intervals, share: float) -> list[JudgedCost]:
    costs = []
    for pool in mix.pools:
        cost = question.pricing(pool.engine)
        if isinstance(cost, ObservedOperations):
            cost.known_interval = intervals.get(pool.engine.name)
        costs.append(cost.at_share(share))
    return costs


def _tried(question: Question, mix: Mix, costs: Sequence[JudgedCost], to_the_end: bool = False) -> Trial:
    fleet = mix.fleet(question.router)
    kinds = zip(fleet.pools, mix.pools, costs, strict=True)
    pools = [PricedPool(config, pool.engine.deployment, cost) for config, pool, cost in kinds]
    return simulated_fleet(question, fleet, pools, sum(pool.replicas for pool in mix.pools), to_the_end)


def _drawn(question: Question, mix: Mix, draw: int) -> tuple[Question, Mix]:
    there = [on_draw(question, pool.engine, draw) for pool in mix.pools]
    pools = zip(mix.pools, there, strict=True)
    return there[0][0], Mix(tuple(pool._replace(engine=engine) for pool, (_, engine) in pools))


def _holding(question: Question, mix: Mix, intervals: Intervals, known: dict[int, Trial]) -> float | None:
    """Return the probability that a mix meets all objectives, in whole percent up to `SURE`; None if not known.

    `known` are trials by percent of the cases in which steps are faster; they are not simulated again.
    """
    costs = [question.pricing(pool.engine) for pool in mix.pools]
    if any(cost.at_share(SURE) is cost for cost in costs):
        return None

    def trial_at(percent: int) -> Trial:
        return known.get(percent) or _tried(
            question, mix, _at_share(question, mix, intervals, percent / 100), to_the_end=True
        )

    likely, planned = round(100 * LIKELY), round(100 * (1 - question.risk))
    place = NormalDist().inv_cdf
    return last_to_hold(0, round(100 * SURE) + 1, trial_at, (likely, planned), lambda p: place(p / 100)).last / 100
