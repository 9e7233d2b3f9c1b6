"""The least number of replicas of every engine that may be among the cheapest, all of them bisected in step.

In each round one fleet is tried for every engine still in the running. An engine leaves when the fewest replicas that
it may need cost more than the cheapest fleets found so far, or half as much again as the cheapest of all: an engine
that cannot win, nor come near, is never searched to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planning.plan.bisection import Bisection
from planning.plan.candidates import Engine
from planning.plan.lower_bounds import least_replicas
from planning.plan.trial import Question, Trial, try_alone, try_fleet
from planning.workers import Task, Workers

_NEAR = 1.5  # times the price of the cheapest fleet: fleets up to this price are shown beside it
_PATIENCE = 4  # times the first fleet tried: when that fails too, maybe nothing will do


OnProgress = Callable[[float], None]  # gets the approximate number of simulations of the whole traffic still to come
Try = Callable[..., Trial]  # takes a question, an engine, and, unless each request has a replica to itself, `replicas`


def silent(left: float) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Searched:
    """The state of the search for one engine.

    Attributes:
        bisection: over replicas
        trials: of fleets, in the order tried
        alone: every request with a replica to itself, once that is in doubt (None: not tried); if it breaks an
            objective, no number of replicas will do
        pruned: it was given up because it costs more than others, at `least` replicas already
    """

    engine: Engine
    bisection: Bisection
    trials: tuple[Trial, ...] = ()
    alone: Trial | None = None
    pruned: bool = False

    @property
    def replicas(self) -> int | None:
        """The fewest that meet all objectives; None if there is no such number, or it is not known."""
        return self.bisection.high if self.bisection.done else None

    @property
    def least(self) -> int:
        """The least number of replicas that it may take."""
        return self.bisection.low + 1

    @property
    def open(self) -> bool:
        """True if there is still something to try."""
        if self.pruned or (self.alone is not None and not self.alone.met):
            return False
        return self.in_doubt or not self.bisection.done

    @property
    def in_doubt(self) -> bool:
        """True if so many fleets have failed that it must be checked whether any can do."""
        if self.alone is not None or self.bisection.high is not None:
            return False
        return self.bisection.done or self.bisection.low >= _PATIENCE * self.bisection.start

    def usd_per_hour(self, replicas: int, spares: int) -> float:
        """Return the price of `replicas` that carry the traffic, and of the spares."""
        return (replicas + spares) * self.engine.usd_per_hour


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
) -> list[Searched]:
    """Search the fewest replicas of every engine, up to `most`.

    An engine is pruned if `keep` others are cheaper, or one is by far: `near` times, and by more than any risk makes up
    for. A `resumed` search goes on from its state, and nothing is pruned that may cost less than `dearest`. The results
    are in the order of the engines. `progress` is called before every round. `trial` tries fleets, and `alone` whether
    any can do.
    """
    searched = list(resumed or ())
    if not searched:
        starts = workers.run([partial(_start, engine=engine, most=most) for engine in engines])
        searched = [Searched(engine, start) for engine, start in zip(engines, starts, strict=True)]
    while True:
        limit = max(dearest, _dearest(searched, spares, keep, max(near, 1 / (1 - workers.common.risk))))
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
    """Return the price limit: that of the `keep` cheapest, or `near` times the cheapest; infinite if none is known."""
    known = sorted(
        entry.usd_per_hour(entry.bisection.high, spares) for entry in searched if entry.bisection.high is not None
    )
    return min([*known[keep - 1 : keep], *(near * usd for usd in known[:1])], default=math.inf)


def _pruned(entry: Searched, spares: int, dearest: float) -> Searched:
    hopeless = entry.open and entry.usd_per_hour(entry.least, spares) > dearest
    return replace(entry, pruned=True) if hopeless else entry


def _ask(entry: Searched, spares: int, dearest: float, trial: Try, alone: Try) -> Task[Question, Trial]:
    """Return the next simulation; while no fleet is known to do, it is none that would be too dear anyway."""
    if entry.in_doubt:
        return partial(alone, engine=entry.engine)
    price = entry.engine.usd_per_hour
    within = int(dearest / price + 1e-9) - spares if price > 0 and dearest < math.inf else None
    return partial(trial, engine=entry.engine, replicas=entry.bisection.ask(within))


def _with_trial(entry: Searched, trial: Trial) -> Searched:
    if entry.in_doubt:
        return replace(entry, alone=trial)
    answered = entry.bisection.answered(trial.replicas, trial.met)
    return replace(entry, bisection=answered, trials=(*entry.trials, trial))
