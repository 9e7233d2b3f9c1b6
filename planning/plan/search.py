"""The least number of replicas of every engine that may be among the cheapest, all of them bisected in step.

In each round every engine that is still in the running has one fleet tried. It leaves when the fewest replicas that
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

_NEAR = 1.5  # times the price of the cheapest fleet: others that cost no more are told beside it
_PATIENCE = 4  # times the first fleet tried: when that fails too, maybe nothing will do


OnProgress = Callable[[float], None]  # about how many simulations of the whole traffic are still to come
Try = Callable[..., Trial]  # of a question, an engine, and, unless each request has a replica to itself, of `replicas`


def silent(left: float) -> None:
    """For when nobody asks how far it is."""


@dataclass(frozen=True)
class Searched:
    """What is known of one engine.

    bisection   over replicas
    trials      of fleets, in the order tried
    alone       every request with a replica to itself, once that is in doubt (None: it has not been); where it breaks
                an objective, no number of replicas will do
    pruned      it was given up because it costs more than others, at `least` replicas already
    """

    engine: Engine
    bisection: Bisection
    trials: tuple[Trial, ...] = ()
    alone: Trial | None = None
    pruned: bool = False

    @property
    def replicas(self) -> int | None:
        """The fewest that meet all objectives; None when there is no such number, or when it is not known."""
        return self.bisection.high if self.bisection.done else None

    @property
    def least(self) -> int:
        """It takes no fewer."""
        return self.bisection.low + 1

    @property
    def open(self) -> bool:
        """Whether there is still something to try."""
        if self.pruned or (self.alone is not None and not self.alone.met):
            return False
        return self.in_doubt or not self.bisection.done

    @property
    def in_doubt(self) -> bool:
        """Whether so many fleets have failed that it must be checked whether any can do."""
        if self.alone is not None or self.bisection.high is not None:
            return False
        return self.bisection.done or self.bisection.low >= _PATIENCE * self.bisection.start

    def usd_per_hour(self, replicas: int, spares: int) -> float:
        """Price of that many replicas that carry the traffic, and the spares."""
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
    """Every engine with its fewest replicas, up to `most`, or pruned where `keep` others are cheaper, or one by far:
    `near` times, and by more than any risk makes up for.

    What was `resumed` goes on from there, and nothing is pruned that may cost less than `dearest`.
    They are in the order given. `progress` is called before every round. Fleets are tried by `trial`, and by `alone`
    whether any can do.
    """
    found = list(resumed or ())
    if not found:
        starts = workers.run([partial(_start, engine=engine, most=most) for engine in engines])
        found = [Searched(engine, start) for engine, start in zip(engines, starts, strict=True)]
    while True:
        limit = max(dearest, _dearest(found, spares, keep, max(near, 1 / (1 - workers.common.risk))))
        found = [_pruned(entry, spares, limit) for entry in found]
        trials = [(at, _ask(entry, spares, limit, trial, alone)) for at, entry in enumerate(found) if entry.open]
        progress(sum(entry.bisection.left for entry in found if entry.open))
        if not trials:
            return found
        answers = workers.run([task for _, task in trials])
        for (at, _), answer in zip(trials, answers, strict=True):
            found[at] = _with_trial(found[at], answer)


def _start(question: Question, engine: Engine, most: int) -> Bisection:
    least = least_replicas(question, engine, question.pricing(engine))
    return Bisection(low=min(least - 1, most), most=most, start=least)


def _dearest(found: Sequence[Searched], spares: int, keep: int, near: float) -> float:
    """What neither the `keep` cheapest cost more than, nor `near` times the cheapest; infinite if none is known."""
    known = sorted(
        entry.usd_per_hour(entry.bisection.high, spares) for entry in found if entry.bisection.high is not None
    )
    return min([*known[keep - 1 : keep], *(near * usd for usd in known[:1])], default=math.inf)


def _pruned(entry: Searched, spares: int, dearest: float) -> Searched:
    hopeless = entry.open and entry.usd_per_hour(entry.least, spares) > dearest
    return replace(entry, pruned=True) if hopeless else entry


def _ask(entry: Searched, spares: int, dearest: float, trial: Try, alone: Try) -> Task[Question, Trial]:
    """What to simulate next; while no fleet is known to do, none that would be too dear anyway."""
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
