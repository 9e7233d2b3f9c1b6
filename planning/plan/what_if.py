"""An answered plan at other prices, with other spares or another risk, from what was simulated already.

Step times, and therefore the fleets that meet the SLOs, do not depend on prices and spares, which only rank the same
fleets anew. With another risk, the answered engine needs another number of replicas; the plan knows for several numbers
how probably the SLOs hold. Where a fleet that was not simulated may be the answer, `WhatIf.doubt` says so. More
replicas of an engine are assumed never to hold the SLOs less probably.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tokentwin.planning.plan.document import SURE, PlanDocument
from tokentwin.planning.plan.frontier import Fleet
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.worth import MORE, choose
from tokentwin.serving.deployments.gpu_spec import find_gpu

_ROUNDING = 1e-9  # rounding error of a mean of probabilities
NOT_SIMULATED = frozenset({"prices", "spares", "risk"})  # inputs that no simulation depends on


@dataclass(frozen=True)
class WhatIf:
    """The best of the fleets that were simulated.

    Attributes:
        holds: probability that every SLO holds; None if unknown
        doubt: the reason why a complete plan may have another answer; empty if it has this one
    """

    fleet: Fleet
    holds: float | None
    doubt: str = ""


def what_if(answer: PlanDocument, before: PlanRequest, now: PlanRequest) -> WhatIf | None:
    """Return the answer to `now`, from the answer to `before`; None if it does not follow from what was simulated.

    The requests may differ in `NOT_SIMULATED` only. Spot prices and mixed fleets need a new plan.
    """
    best, fields = answer.recommendation, set(PlanRequest.model_fields) - NOT_SIMULATED
    if best is None or type(now) is not type(before) or now.asks_mixed_fleets:
        return None
    if any(getattr(now, name) != getattr(before, name) for name in fields):
        return None
    there = _Repriced(answer, before, now)
    if not there.comparable:
        return None
    if now.risk != before.risk:
        return _at_risk(answer, there, now.risk)
    sizes = {(one.engine, one.replicas): one.holds for one in (best, *answer.runners_up)}
    fleets = [there.fleet(engine, replicas) for engine, replicas in sizes]
    weights = np.array([there.weight(fleet) for fleet in fleets])
    holds = [chance for chance in sizes.values() if chance is not None]
    known = len(holds) == len(fleets) and bool(weights.all())
    at = (choose(np.array(holds), np.array(holds) / weights, now.risk) or 0) if known else int(weights.argmin())
    fleet, chance = fleets[at], list(sizes.values())[at]
    below = weights[at] * (SURE / chance if chance else 1.0)  # no other fleet can be worth more at this weight
    return WhatIf(fleet, chance, _doubt(there.others({engine for engine, _ in sizes}, below)))


def _at_risk(answer: PlanDocument, there: _Repriced, risk: float) -> WhatIf | None:
    """Return the fleet of the greatest worth among those that are known to hold with `risk`; None without one."""
    known = {size: chance for size, chance in answer.hold_probabilities.items() if chance is not None}
    enough = sorted(
        (size for size, chance in known.items() if chance >= 1 - risk - _ROUNDING), key=lambda size: size[1]
    )
    fleets = sorted((there.fleet(*size) for size in enough), key=there.weight)
    weights = np.array([there.weight(fleet) for fleet in fleets])
    if not fleets or not weights.all():
        return None
    holds = np.array([known[fleet.engine, fleet.replicas] for fleet in fleets])
    at = choose(holds, holds / weights, risk) or 0
    fleet, chance = fleets[at], float(holds[at])
    rivals = [*there.rivals(known, chance / weights[at], risk)]
    rivals += there.others({engine for engine, _ in known}, weights[at] * SURE / chance)
    fewest = next(replicas for engine, replicas in enough if engine == fleet.engine)
    if fleet.replicas - fewest not in MORE:  # numbers that a plan does not try
        rivals.insert(0, fleet.engine)
    drawn = answer.recommendation is not None and answer.recommendation.draws
    return WhatIf(
        fleet, chance, _doubt(rivals) or ("a complete plan would also size it for other draws" if drawn else "")
    )


def _doubt(engines: Iterable[str]) -> str:
    names = list(dict.fromkeys(engines))
    return f"a complete plan would also size {' and '.join(names[:2])}" if names else ""


class _Repriced:
    """The fleets of an answer at the prices and with the spares of another request."""

    def __init__(self, answer: PlanDocument, before: PlanRequest, now: PlanRequest) -> None:
        self._answer, self._before, self._now, self._prices = answer, before, now, (before.prices, now.prices)
        best = answer.recommendation
        offers: list[Fleet] = [*answer.points, *answer.runners_up, *([best] if best else ())]
        self._known = {offer.engine: offer for offer in offers}

    @property
    def comparable(self) -> bool:
        """False if a GPU was free and no longer is: then its fleets' present prices do not follow from the former."""
        gpus = {candidate.gpu for candidate in self._answer.candidates.values()}
        return all(was or not is_now for was, is_now in map(self._prices_of, gpus))

    def fleet(self, engine: str, replicas: int) -> Fleet:
        """Return replicas of an engine of which a fleet is known."""
        known, bought = self._known[engine], replicas + self._now.spares
        was = known.replicas + self._before.spares
        usd = known.usd_per_hour / was * self._ratio(engine)
        return Fleet(engine=engine, replicas=replicas, gpus=known.gpus // was * bought, usd_per_hour=usd * bought)

    def weight(self, fleet: Fleet) -> float:
        """Return what the request wants little of: dollars an hour, or GPUs."""
        return float(fleet.gpus) if self._now.rank_by == "gpus" else fleet.usd_per_hour

    def rivals(self, known: Mapping[tuple[str, int], float], worth: float, risk: float) -> Iterator[str]:
        """Yield engines of which a number of replicas that is not `known` may hold with `risk` and be worth more."""
        for engine in dict.fromkeys(engine for engine, _ in known):
            mine = {replicas: chance for (name, replicas), chance in known.items() if name == engine}
            for replicas in range(self._too_few(engine) + 1, max(mine) + 2):
                most = min((chance for number, chance in mine.items() if number >= replicas), default=SURE)
                least = worth * self.weight(self.fleet(engine, replicas))
                if replicas not in mine and most >= 1 - risk - _ROUNDING and most > least:
                    yield engine
                    break

    def others(self, sized: set[str], below: float) -> Iterator[str]:
        """Yield the other engines that may meet the SLOs with a fleet that weighs less than `below`."""
        more_risk, by_gpus = self._now.risk > self._before.risk, self._now.rank_by == "gpus"
        fewer = min((1 + self._now.spares) / (1 + self._before.spares), 1.0)  # of one replica, the most that can go
        for dearer in self._answer.dearer:
            usd = dearer.usd_per_hour_at_least * self._ratio(dearer.engine)
            least = fewer * (float(dearer.gpus_at_least or 0) if by_gpus else usd)
            if more_risk or least < below:  # with more risk, fewer replicas may be enough
                yield dearer.engine
        failed = {one.engine: one.borderline for one in self._answer.infeasible}
        if more_risk:
            yield from (engine for engine, borderline in failed.items() if borderline)
        for engine in sorted(self._known.keys() - sized - {one.engine for one in self._answer.dearer} - failed.keys()):
            met = [point.replicas for point in self._answer.points if point.engine == engine and point.met]
            fewest = self._too_few(engine) + 1 if more_risk else min(met, default=1)
            if self.weight(self.fleet(engine, fewest)) < below:
                yield engine

    def _too_few(self, engine: str) -> int:
        """Return the greatest number of replicas that is known to break the SLOs with every risk up to 50 %."""
        points = (point for point in self._answer.points if point.engine == engine and not point.met_as_predicted)
        too_few = max((point.replicas for point in points), default=0)
        best = self._answer.recommendation
        likely = best.choices.as_predicted.replicas if best and best.choices and best.engine == engine else 1
        return max(too_few, likely - 1)

    def _ratio(self, engine: str) -> float:
        """Return the present price of an engine over its former one."""
        was, is_now = self._prices_of(self._answer.candidates[engine].gpu)
        return is_now / was if was else 1.0

    def _prices_of(self, gpu: str) -> tuple[float, float]:
        """Return the former and the present price of a GPU."""
        was, is_now = (prices[gpu] if gpu in prices else find_gpu(gpu).usd_per_hour for prices in self._prices)
        return was, is_now
