"""The worth of a fleet: the traffic that it serves per dollar, times the probability that it meets the SLOs.

All fleets serve the same traffic, so a cheaper fleet serves more per dollar. A fleet that breaks an SLO is worth
nothing. The expected worth of a fleet is therefore its own probability divided by its price, even if the errors of
fleets are correlated.

The choice is the fleet with the greatest expected worth among the fleets that are likely enough to meet the SLOs.
"Likely enough" is relative to the fleet that is most likely to meet them. If no fleet is certain, the most likely one
is hardly more likely than others and may cost much more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import SURE
from tokentwin.planning.plan.sensitivity import holding
from tokentwin.planning.plan.trial import Question
from tokentwin.planning.workers import Workers

RISK = 0.1  # accepted probability of breaking a bound, by default
MORE = (0, 1, 2, 4, 8)  # numbers of replicas that are added to the fewest that an engine needs
_ROUNDING = 1e-9  # rounding error of a mean of probabilities


@dataclass(frozen=True)
class Fleet:
    """A number of replicas of an engine that serve the traffic, and the price with spares (or their number of GPUs).

    `holds` is the probability that it meets all objectives on the planned traffic; None if the error of step times is
    unknown.
    """

    engine: Engine
    replicas: int
    weight: float
    holds: float | None = None


class Probabilities(NamedTuple):
    """The probability that a fleet meets all objectives: on the planned traffic, and on each other draw of the traffic.

    `planned` is None if the error of step times is unknown.
    """

    planned: float | None
    draws: tuple[float, ...] = ()

    @property
    def mean(self) -> float | None:
        """The mean over all draws, which are equally likely."""
        return None if self.planned is None else (self.planned + sum(self.draws)) / (1 + len(self.draws))


def probabilities_of(workers: Workers[Question], fleets: Sequence[tuple[Engine, int]]) -> list[Probabilities]:
    """Return the probabilities of each fleet; on other draws they do not exceed that on the planned traffic."""
    draws = range(len(workers.common.draws))
    planned = workers.run([partial(holding, engine=engine, replicas=n) for engine, n in fleets])
    tasks = [
        partial(holding, engine=engine, replicas=n, draw=draw, most=SURE if most is None else most)
        for (engine, n), most in zip(fleets, planned, strict=True)
        for draw in draws
    ]
    answers = workers.run(tasks)
    on_draws = [answers[at * len(draws) : (at + 1) * len(draws)] for at in range(len(planned))]
    return [
        Probabilities(p, tuple(d for d in drawn if d is not None)) for p, drawn in zip(planned, on_draws, strict=True)
    ]


def most_worth(
    workers: Workers[Question], fewest: Sequence[tuple[Engine, int]], most: int, spares: int
) -> list[tuple[Fleet, Probabilities]]:
    """Return the fleet with the highest worth first, then fleets of the other engines, each with its own best size.

    An engine is sized so that it meets the objectives with the accepted risk on all draws of the traffic. So no answer
    costs more than another that meets them with at least the same probability. `fewest` has the fewest replicas of each
    engine, the cheapest engine first. Engines that cannot be worth more than the best so far, even with probability
    `SURE`, are left out.
    """
    sized: list[tuple[Fleet, Probabilities]] = []
    beaten = 0.0  # the highest worth of a fleet that meets the objectives with the accepted risk
    for engine, replicas in fewest:
        usd = (replicas + spares) * engine.weight
        if sized and usd and SURE / usd <= beaten:
            continue
        fleet, probabilities = _sized(workers, engine, replicas, most, spares)
        sized.append((fleet, probabilities))
        if probabilities.mean is None or not fleet.weight:
            break  # without probabilities or prices, the cheapest engine is the answer
        if probabilities.mean >= 1 - workers.common.risk - _ROUNDING:
            beaten = max(beaten, probabilities.mean / fleet.weight)
    known = np.array([np.nan if probabilities.mean is None else probabilities.mean for _, probabilities in sized])
    prices = np.array([fleet.weight for fleet, _ in sized])
    best = 0
    if not np.isnan(known).any() and prices.all():
        best = choose(known + _ROUNDING, known / prices, workers.common.risk) or 0
    return [sized[best], *sized[:best], *sized[best + 1 :]]


def _sized(
    workers: Workers[Question], engine: Engine, fewest: int, most: int, spares: int
) -> tuple[Fleet, Probabilities]:
    """Return the fleet of one engine with the highest worth that has the accepted risk on other draws, too."""
    best = _most_worth(workers, [(engine, fewest)], most, spares)
    if not workers.common.draws:
        return best, Probabilities(best.holds)
    stride, last = max(best.replicas // 8, 1), min(2 * best.replicas + 1, most)
    for replicas in (*range(best.replicas, last, stride), last):
        (probabilities,) = probabilities_of(workers, [(engine, replicas)])
        if probabilities.mean is None or probabilities.mean >= 1 - workers.common.risk - _ROUNDING:
            break
    return Fleet(engine, replicas, (replicas + spares) * engine.weight, probabilities.planned), probabilities


def _most_worth(workers: Workers[Question], fewest: Sequence[tuple[Engine, int]], most: int, spares: int) -> Fleet:
    """Return the fleet with the highest worth, among the `fewest` replicas of each engine and a few more.

    `fewest` has the cheapest engine first; its fleets meet the objectives with the accepted risk. The probability of a
    fleet that cannot be worth more than the cheapest fleet is not computed.
    """
    least = 1 - workers.common.risk

    def fleet(engine: Engine, replicas: int) -> Fleet:
        return Fleet(engine, replicas, (replicas + spares) * engine.weight)

    cheapest = fleet(*fewest[0])
    (sure,) = workers.run([partial(holding, engine=cheapest.engine, replicas=cheapest.replicas, least=least)])
    if sure is None or not cheapest.weight:
        return replace(cheapest, holds=sure)
    fleets, tasks = [cheapest], []
    for engine, replicas in fewest:
        for other in (fleet(engine, replicas + more) for more in MORE if replicas + more <= most):
            wanted = math.floor(100 * sure * other.weight / cheapest.weight + 1e-9) + 1
            if wanted <= 100 * SURE and (other.engine, other.replicas) != (cheapest.engine, cheapest.replicas):
                fleets.append(other)
                tasks.append(partial(holding, engine=engine, replicas=other.replicas, least=least, wanted=wanted / 100))
    holds = np.array([sure, *workers.run(tasks)])
    best = choose(holds, holds / [f.weight for f in fleets], workers.common.risk) or 0
    return replace(fleets[best], holds=float(holds[best]))


def choose(holds: NDArray[np.float64], worth: NDArray[np.float64], risk: float = RISK) -> int | None:
    """Return the index of the option to take, or None if no option ever keeps its bounds.

    `holds` is each option's probability of keeping its bounds, and `worth` is its expected worth, both `[options]`. The
    choice is the option with the greatest worth among the options with a probability of at least (1 - `risk`) times the
    largest probability. A greater risk never lowers the worth of the chosen option.
    """
    if not holds.any():
        return None
    sure = holds >= (1.0 - risk) * holds.max() - 1e-9
    return int(np.argmax(np.where(sure, worth, -np.inf)))
