"""A plan within seconds: the cheapest fleet by a small part of each on its part of the traffic, then by a larger one.

It is a first answer, and may be wrong; the whole one comes from whole fleets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from planning.plan.candidates import Engine
from planning.plan.frontier import point
from planning.plan.plan import Limits
from planning.plan.search import search
from planning.plan.share import try_share, try_some_alone
from planning.plan.trial import Question
from planning.workers import Workers

ENOUGH = (100, 500)  # requests that the part of a fleet gets, at least
_FIELDS = ("engine", "replicas", "gpus", "usd_per_hour", "met")  # what a part of a fleet tells of the whole


def first_answers(question: Question, engines: Sequence[Engine], limits: Limits) -> Iterator[dict[str, Any]]:
    """Each better than the one before: `point` has the fleet, without anything around it; None if none will do."""
    for enough in ENOUGH:
        with Workers(question, jobs=1) as workers:
            trial = partial(try_share, enough=enough)
            found = search(workers, engines, limits.most, limits.spares, keep=1, trial=trial, alone=try_some_alone)
        offers = [
            point(entry.engine, trial, limits.spares)
            for entry in found
            for trial in entry.trials
            if trial.replicas == entry.replicas
        ]
        best = min(offers, key=lambda offer: (offer.usd_per_hour, offer.gpus), default=None)
        yield {"point": best and {name: getattr(best, name) for name in _FIELDS}}
