"""The search for the fewest replicas of every engine that may be among the cheapest, by bisection.

In each round one fleet is tried for every engine whose search is open. The search for an engine ends early (it is
pruned) when the fewest replicas that it may need cost more than the cheapest fleets found so far, or half as much again
as the cheapest fleet. A `Bisection` is one state of a search. Its caller tries one number at a time, so many searches
can run in parallel: `ask` returns the next number to try, and `answered` returns the state after the result.

The search begins at a lower bound that follows from throughput alone, without a simulation. An objective gives the time
by which most requests must have their first or their last token. By then their prompts, or their output tokens, must
have been processed. The bound assumes the best rate that the cost model has for prompts or for output tokens, because
sharing steps with other work makes neither faster. The bound only skips trials that would fail; it is never an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tokentwin.planning.plan.candidates import Engine, Split
from tokentwin.planning.plan.objectives import Objective
from tokentwin.planning.plan.trial import Question, Trial, try_alone, try_fleet
from tokentwin.planning.traffic import waits_for_answers
from tokentwin.planning.workers import Task, Workers
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.step_plan import StepPlan


@dataclass(frozen=True)
class Bisection:
    """A search for the lowest number above `low` and up to `most` for which the property holds.

    Attributes:
        low: number for which the property does not hold, like all numbers below
        most: maximum number
        start: first number to try; then numbers are doubled until the property holds
        high: lowest number for which the property is known to hold; None if there is none yet
    """

    low: int
    most: int
    start: int
    high: int | None = None

    @property
    def done(self) -> bool:
        """True if the search has ended: the answer is `high`, or there is no such number."""
        return self.low + 1 == self.high if self.high is not None else self.low >= self.most

    @property
    def left(self) -> int:
        """The number of tries left; an estimate as long as `high` is None."""
        if self.done:
            return 0
        if self.high is not None:
            return (self.high - self.low - 1).bit_length()
        return 1 + max(self.start, self.low).bit_length()

    def ask(self, within: int | None = None) -> int:
        """Return the number to try next; as long as `high` is None, it does not exceed `within`."""
        if self.high is not None:
            return (self.low + self.high) // 2
        guess = self.start if self.start > self.low else 2 * self.low
        return max(min(guess, self.most if within is None else min(within, self.most)), self.low + 1)

    def answered(self, number: int, holds: bool) -> Bisection:
        """Return the state of the search after a try: `holds` says whether the property holds for `number`."""
        if holds:
            return replace(self, high=number if self.high is None else min(number, self.high))
        return replace(self, low=max(number, self.low))


_SHORTEST_CHUNK = 16  # assumed number of tokens of each prompt in a step, so few that attention takes hardly any time


def least_replicas(question: Question, engine: Engine, cost: CostModel) -> int:
    """Return a lower bound of the replicas that meet the objectives; larger steps are assumed to take no less time."""
    workload, scheduler = question.workload, engine.deployment.scheduler
    split = engine.split or Split(1, 0)
    prefilling, decoding = split.prefill, split.decode or split.prefill  # engines of a replica
    if waits_for_answers(workload):
        return 1  # the time of the last arrival is not known
    requests = list(workload.requests)
    span_ms = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e6
    prompts, outputs = question.demand  # the prompt's last step gives the first token
    least = 1.0
    for objective in question.objectives.slos:
        if objective.slo_class:
            continue  # other requests may wait for the requests of this class
        must = len(requests) - objective.allowed(len(requests))
        first_ms, last_ms = _deadlines(objective, outputs[-1])
        if math.isfinite(first_ms):
            work_ms = sum(prompts[:must]) * _prompt_token_ms(cost, scheduler)
            least = max(least, work_ms / prefilling / (span_ms + first_ms))
        if math.isfinite(last_ms):
            work_ms = sum(outputs[:must]) * _output_token_ms(cost, scheduler)
            least = max(least, work_ms / decoding / (span_ms + last_ms))
    return math.ceil(least / engine.deployment.data_parallel_size * (1 - 1e-9))


def _deadlines(objective: Objective, longest: int) -> tuple[float, float]:
    """Return the maximum ms from arrival to the first and to the last token of a request that meets the objective."""
    bounds = dict(objective.bounds)
    e2e = bounds.get("e2e_ms", math.inf)
    first = min(bounds.get("ttft_ms", math.inf), e2e)
    return first, min(e2e, first + bounds.get("tpot_ms", math.inf) * max(longest, 1))


def _prompt_token_ms(cost: CostModel, scheduler: SchedulerConfig) -> float:
    most = max(scheduler.most_step_tokens, _SHORTEST_CHUNK)
    return min(_prefill_ns(cost, tokens) / tokens for tokens in _doubling(_SHORTEST_CHUNK, most)) / 1e6


def _prefill_ns(cost: CostModel, tokens: int) -> int:
    plan = StepPlan(0, DecodeSet(1), 0)
    plan.prefill_tokens = tokens
    plan.prefill_rows = max(tokens // _SHORTEST_CHUNK, 1)
    plan.prefill_pairs = tokens * (_SHORTEST_CHUNK + 1) // 2
    return cost.step_ns(plan)


def _output_token_ms(cost: CostModel, scheduler: SchedulerConfig) -> float:
    """Return the shortest ms per output token; each row has one token of context, and all draft tokens are accepted."""
    per_row = 1 + (scheduler.speculative.num_speculative_tokens if scheduler.speculative else 0)
    most = min(scheduler.most_running, scheduler.most_step_tokens)
    times = ((rows, next(iter(cost.decode_run_ns(rows, rows, rows, 1)))) for rows in _doubling(1, most))
    return min(ns / (rows * per_row) for rows, ns in times) / 1e6


def _doubling(first: int, last: int) -> Iterable[int]:
    size = first
    while size < last:
        yield size
        size *= 2
    yield last


_NEAR = 1.5  # factor over the price of the cheapest fleet, up to which fleets are shown beside it
_PATIENCE = 4  # factor over the first number of replicas tried; if so many fail, it is doubted that any number will do


OnProgress = Callable[[float], None]  # called with the approximate number of simulations of the whole traffic left
Try = Callable[..., Trial]  # takes a question, an engine, and, unless each request has a replica to itself, `replicas`


def silent(left: float) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Searched:
    """The state of the search for one engine.

    Attributes:
        bisection: state of the bisection over the number of replicas
        trials: trials of fleets, in the order in which they were made
        alone: trial with a replica for every request, made if it is doubted that any number of replicas will do; if it
            breaks an objective, no number will do; None if it was not made
        pruned: True if the search ended early, because the engine costs more than others with only `least` replicas
    """

    engine: Engine
    bisection: Bisection
    trials: tuple[Trial, ...] = ()
    alone: Trial | None = None
    pruned: bool = False

    @property
    def replicas(self) -> int | None:
        """The fewest replicas that meet all objectives; None if there is no such number, or it is not known."""
        return self.bisection.high if self.bisection.done else None

    @property
    def failed(self) -> bool:
        """True if no number of replicas is enough."""
        return self.replicas is None and not self.pruned

    @property
    def least(self) -> int:
        """The lowest number of replicas that may meet all objectives."""
        return self.bisection.low + 1

    @property
    def open(self) -> bool:
        """True if there are still fleets to try."""
        if self.pruned or (self.alone is not None and not self.alone.met):
            return False
        return self.in_doubt or not self.bisection.done

    @property
    def in_doubt(self) -> bool:
        """True if so many fleets have failed that it must be checked whether any number of replicas can do."""
        if self.alone is not None or self.bisection.high is not None:
            return False
        return self.bisection.done or self.bisection.low >= _PATIENCE * self.bisection.start

    def weight(self, replicas: int, spares: int) -> float:
        """Return the dollars an hour, or GPUs, of `replicas` that serve the traffic and of the spares."""
        return (replicas + spares) * self.engine.weight


def search(
    workers: Workers[Question],
    engines: Sequence[Engine],
    most: int,
    spares: int = 0,
    keep: int = 4,
    progress: OnProgress = silent,
    trial: Try = try_fleet,
    alone: Try = try_alone,
    near: float = _NEAR,
    resumed: Sequence[Searched] | None = None,
    dearest: float = 0.0,
    cap: float = math.inf,
) -> list[Searched]:
    """Search the fewest replicas of every engine that meet the objectives, up to `most`.

    An engine is pruned if `keep` others are cheaper, or if its price is more than `near` times the lowest price, and
    more than the accepted risk can make up for, or more than `cap`. A `resumed` search continues from its state; an
    engine that may cost less than `dearest` is not pruned. The results are in the order of the engines. `progress` is
    called before every round. `trial` is the function that tries a number of replicas, and `alone` the function that
    checks whether any number can do.
    """
    searched = list(resumed or ())
    if not searched:
        starts = workers.run([partial(_start, engine=engine, most=most) for engine in engines])
        searched = [Searched(engine, start) for engine, start in zip(engines, starts, strict=True)]
    while True:
        limit = max(dearest, _dearest(searched, spares, keep, max(near, 1 / (1 - workers.common.risk))))
        limit = min(limit, cap)
        searched = [_pruned(entry, spares, limit) for entry in searched]
        trials = [(at, _ask(entry, spares, limit, trial, alone)) for at, entry in enumerate(searched) if entry.open]
        progress(sum(entry.bisection.left for entry in searched if entry.open))
        if not trials:
            return searched
        answers = workers.run([task for _, task in trials])
        for (at, _), answer in zip(trials, answers, strict=True):
            searched[at] = _with_trial(searched[at], answer)


def _start(question: Question, engine: Engine, most: int) -> Bisection:
    least = least_replicas(question, engine, question.pricing(engine))
    return Bisection(low=min(least - 1, most), most=most, start=least)


def _dearest(searched: Sequence[Searched], spares: int, keep: int, near: float) -> float:
    """Return the price limit: the `keep`th lowest price, or `near` times the lowest; infinite if no price is known."""
    known = sorted(entry.weight(entry.bisection.high, spares) for entry in searched if entry.bisection.high is not None)
    return min([*known[keep - 1 : keep], *(near * usd for usd in known[:1])], default=math.inf)


def _pruned(entry: Searched, spares: int, dearest: float) -> Searched:
    hopeless = entry.open and entry.weight(entry.least, spares) > dearest
    return replace(entry, pruned=True) if hopeless else entry


def _ask(entry: Searched, spares: int, dearest: float, trial: Try, alone: Try) -> Task[Question, Trial]:
    """Return the next simulation. As long as no number is known to do, only fleets within the price limit are tried."""
    if entry.in_doubt:
        return partial(alone, engine=entry.engine)
    price = entry.engine.weight
    within = int(dearest / price + 1e-9) - spares if price > 0 and dearest < math.inf else None
    return partial(trial, engine=entry.engine, replicas=entry.bisection.ask(within))


def _with_trial(entry: Searched, trial: Trial) -> Searched:
    if entry.in_doubt:
        return replace(entry, alone=trial)
    answered = entry.bisection.answered(trial.replicas, trial.met)
    return replace(entry, bisection=answered, trials=(*entry.trials, trial))
