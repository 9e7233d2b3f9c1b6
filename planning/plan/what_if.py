"""An answered plan at other prices, with other spares or another risk, from what was simulated already.

Step times, and therefore the fleets that meet the SLOs, do not depend on prices and spares, which only rank the same
fleets anew. With another risk, the answered engine needs another number of replicas; the plan knows for several numbers
how probably the SLOs hold. Where a fleet that was not simulated may be the answer, `WhatIf.doubt` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planning.plan.document import SURE, PlanDocument
from planning.plan.frontier import Fleet
from planning.plan.request import PlanRequest
from planning.plan.worth import choose
from serving.deployments.gpu_spec import find_gpu

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
    if now.risk == before.risk:
        sizes = {(one.engine, one.replicas): one.holds for one in (best, *answer.runners_up)}
    else:
        sizes = dict(_at_risk(answer, now.risk))
        if not sizes:
            return None
    fleets = [there.fleet(engine, replicas) for engine, replicas in sizes]
    weights = np.array([there.weight(fleet) for fleet in fleets])
    holds = [chance for chance in sizes.values() if chance is not None]
    known = len(holds) == len(fleets) and bool(weights.all())
    at = (choose(np.array(holds), np.array(holds) / weights, now.risk) or 0) if known else int(weights.argmin())
    fleet, chance = fleets[at], list(sizes.values())[at]
    below = weights[at] * (SURE / chance if chance else 1.0)  # no other fleet can be worth more at this weight
    doubtful = [engine for engine, least in there.others({engine for engine, _ in sizes}) if least < below]
    doubt = f"a complete plan would also size {' and '.join(doubtful[:2])}" if doubtful else ""
    return WhatIf(fleet, chance, doubt)


def _at_risk(answer: PlanDocument, risk: float) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the fewest replicas of the answered engine that hold with `risk`, unless a number between may hold, too."""
    best = answer.recommendation
    choices = best.choices.existing if best and best.choices else ()
    by_replicas = {choice.replicas: choice.holds or 0.0 for choice in choices}
    enough = [replicas for replicas, holds in sorted(by_replicas.items()) if holds >= 1 - risk - 1e-9]
    if best and enough and (enough[0] == min(by_replicas) or enough[0] - 1 in by_replicas):
        yield (best.engine, enough[0]), by_replicas[enough[0]]


class _Repriced:
    """The fleets of an answer at the prices and with the spares of another request."""

    def __init__(self, answer: PlanDocument, before: PlanRequest, now: PlanRequest) -> None:
        self._answer, self._before, self._now, self._prices = answer, before, now, (before.prices, now.prices)
        best = answer.recommendation
        offers: list[Fleet] = [*answer.points, *answer.runners_up, *([best] if best else ())]
        self._known = {offer.engine: offer for offer in offers}

    def fleet(self, engine: str, replicas: int) -> Fleet:
        """Return replicas of an engine of which a fleet is known."""
        known, bought = self._known[engine], replicas + self._now.spares
        was = known.replicas + self._before.spares
        usd = known.usd_per_hour / was * self._ratio(engine)
        return Fleet(engine=engine, replicas=replicas, gpus=known.gpus // was * bought, usd_per_hour=usd * bought)

    def weight(self, fleet: Fleet) -> float:
        """Return what the request wants little of: dollars an hour, or GPUs."""
        return float(fleet.gpus) if self._now.rank_by == "gpus" else fleet.usd_per_hour

    def others(self, sized: set[str]) -> Iterator[tuple[str, float]]:
        """Yield the other engines that may meet the SLOs, and the least that such a fleet weighs."""
        fewer = min((1 + self._now.spares) / (1 + self._before.spares), 1.0)  # of one replica, the most that can go
        for dearer in self._answer.dearer:
            usd = dearer.usd_per_hour_at_least * self._ratio(dearer.engine)
            yield dearer.engine, fewer * (float(dearer.gpus_at_least or 0) if self._now.rank_by == "gpus" else usd)
        hopeless = {one.engine for one in self._answer.dearer} | {one.engine for one in self._answer.infeasible}
        for engine in self._known.keys() - sized - hopeless:
            met = [point.replicas for point in self._answer.points if point.engine == engine and point.met]
            yield engine, self.weight(self.fleet(engine, min(met, default=1)))

    def _ratio(self, engine: str) -> float:
        """Return the present price of an engine over its former one."""
        gpu = self._answer.candidates[engine].gpu
        was, is_now = (prices.get(gpu) or find_gpu(gpu).usd_per_hour for prices in self._prices)
        return is_now / was
