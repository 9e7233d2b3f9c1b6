"""Fleets with spot GPUs, which cost less but may be interrupted.

Interruptions of replicas are assumed to be independent, at a constant rate. So the number of interruptions that concern
some traffic, during it or as long before it as a restart takes, has a Poisson distribution. For each number of replicas
the traffic is simulated with no, one and two interruptions, early, in the middle and late in equal parts of its time;
more count as a broken SLO. The probability that all objectives hold is the mean over these numbers. In a simulation, an
interrupted replica gets no new requests from the notice on, loses its unfinished requests at the end of the notice, and
has a successor after the restart. Replicas on demand and spot replicas are equally fast, so only the price and the
number of interruptions depend on how many there are of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.sensitivity import holding
from tokentwin.planning.plan.trial import LIKELY, Figures, Question, at_share
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.fleet import FailuresConfig, FleetConfig, Interruptions, PoolConfig, RouterConfig

_PLACES = (1 / 6, 1 / 2, 5 / 6)  # places of interruptions within equal parts of the time, each as likely
_MOST = 2  # maximum number of interruptions that are simulated
_MORE = 3  # numbers of replicas that are tried, from the fewest without interruptions up
_RARE = 0.005  # probability below which so many interruptions are not simulated, and count as a broken SLO
_ROUNDING = 1e-9


class Spot(NamedTuple):
    """The prices of spot GPUs in dollars an hour, and how they are interrupted."""

    usd_per_gpu_hour: Mapping[str, float]
    per_hour: float
    notice_s: float = 120.0
    restart_s: float = 180.0

    def interruptions(self, seconds: float, replicas: int) -> float:
        """Return the expected number of interruptions of `replicas` that concern traffic of so many seconds."""
        return self.per_hour / 3600 * replicas * (seconds + self.restart_s)

    def settings(self, at_s: Sequence[float] = (), per_hour: float = 0.0) -> FailuresConfig:
        """Return the failures of a fleet whose pool `spot` is interrupted at given times or at random."""
        one = Interruptions(
            pool="spot", at_s=tuple(at_s), per_hour=per_hour, notice_s=self.notice_s, restart_s=self.restart_s
        )
        return FailuresConfig(interruptions=(one,))


@dataclass(frozen=True)
class Interrupted(Engine):
    """An engine whose replicas are spot replicas that are interrupted at given times, one at each time."""

    failures: FailuresConfig = field(default_factory=FailuresConfig)

    @property
    def name(self) -> str:
        times = self.failures.interruptions[0].at_s
        return f"{super().name} interrupted at {times}"

    def fleet(self, replicas: int, router: str) -> FleetConfig:
        pools = (PoolConfig(name="spot", replicas=replicas),)
        return FleetConfig(pools=pools, router=RouterConfig(name=router), failures=self.failures)


@dataclass(frozen=True)
class SpotFleet:
    """Replicas of an engine on demand and on spot GPUs.

    Attributes:
        holds: probability that all objectives hold
        known: whether the uncertainty of step times is known, so that `holds` contains it
        figures: figures without an interruption, with steps as predicted
        interruptions: expected number of interruptions that concern the traffic
        if_interrupted: attainment with one interruption half way through the traffic
        without_spot: attainment of the replicas on demand alone
    """

    engine: Engine
    on_demand: int
    spot: int
    usd_per_hour: float
    holds: float
    known: bool
    figures: Figures
    interruptions: float
    if_interrupted: float
    without_spot: float = 0.0

    def fleet(self, router: str, spot: Spot) -> FleetConfig:
        """Return the fleet with random interruptions, for `tokentwin simulate`."""
        price = spot.usd_per_gpu_hour[self.engine.gpu]
        pools = [PoolConfig(name="spot", replicas=self.spot, usd_per_gpu_hour=price)]
        if self.on_demand:
            pools.insert(0, PoolConfig(name="on-demand", replicas=self.on_demand))
        router_config, failures = RouterConfig(name=router), spot.settings(per_hour=spot.per_hour)
        return FleetConfig(pools=tuple(pools), router=router_config, failures=failures)


def spot_fleets(
    workers: Workers[Question], fewest: Sequence[tuple[Engine, int]], spot: Spot, most: int, spares: int
) -> list[SpotFleet]:
    """Return for each engine with a spot price the fleet with the highest worth that has the accepted risk.

    If an engine has none, its most likely fleet is returned. `fewest` has the fewest replicas of each engine that meet
    the objectives without interruptions. Spares are on demand.
    """
    priced = [(engine, replicas) for engine, replicas in fewest if engine.gpu in spot.usd_per_gpu_hour]
    return workers.run([partial(_sized, engine=e, fewest=n, spot=spot, most=most, spares=spares) for e, n in priced])


def _sized(question: Question, engine: Engine, fewest: int, spot: Spot, most: int, spares: int) -> SpotFleet:
    fleets: list[SpotFleet] = []
    for replicas in range(fewest, max(min(fewest + _MORE, most + 1), fewest + 1)):
        fleets += _of(question, engine, replicas, spot, spares)
        sure = [fleet for fleet in fleets if fleet.holds >= 1 - question.risk - _ROUNDING]
        if any(not fleet.on_demand for fleet in sure):
            break  # more replicas cost more, and none of these is on demand
    best = max(sure or fleets, key=lambda fleet: (fleet.holds / max(fleet.usd_per_hour, 1e-9)) if sure else fleet.holds)
    if not best.on_demand:
        return best
    alone = at_share(question, engine, best.on_demand, LIKELY, to_the_end=True).figures
    assert alone is not None
    return replace(best, without_spot=alone.attainment)


def _of(question: Question, engine: Engine, replicas: int, spot: Spot, spares: int) -> list[SpotFleet]:
    """Return the fleets of so many replicas, from a single spot replica to spot replicas alone."""
    figures = at_share(question, engine, replicas, LIKELY, to_the_end=True).figures
    assert figures is not None
    rate = figures.steady.requests_per_s
    seconds = (question.requests - 1) / rate if rate else figures.e2e_p99_s
    draws = [holding(question, engine, replicas, draw=draw) for draw in range(len(question.draws))]
    expected = spot.interruptions(seconds, replicas)
    planned = holding(question, engine, replicas)
    met = float(at_share(question, engine, replicas, LIKELY).met)
    probabilities, attained = [met if planned is None else planned], figures.attainment
    for count in range(1, _MOST + 1):
        if (count > 1 and _at_least(count, expected) < _RARE) or not probabilities[-1]:
            break
        probable = []
        for place in _PLACES:
            interrupted = _interrupted(engine, spot, [seconds * (at + place) / count for at in range(count)])
            trial = at_share(question, interrupted, replicas, LIKELY, to_the_end=True)
            known = holding(question, interrupted, replicas)
            probable.append(float(trial.met) if known is None else known)
            if count == 1 and place == _PLACES[1] and trial.figures is not None:
                attained = trial.figures.attainment
        probabilities.append(fmean(probable))
    first = probabilities[0]
    others = [p for p in draws if p is not None]
    elsewhere = (first + sum(others)) / (1 + len(others)) / first if first else 1.0
    made = []
    for spots in range(1, replicas + 1):
        mean = spot.interruptions(seconds, spots)
        chance = sum(_poisson(count, mean) * p for count, p in enumerate(probabilities))
        usd = (replicas - spots + spares) * engine.usd_per_hour
        usd += spots * engine.gpus * spot.usd_per_gpu_hour[engine.gpu]
        likely = min(elsewhere, 1.0) * chance
        on_demand, sure = replicas - spots, planned is not None
        made.append(SpotFleet(engine, on_demand, spots, usd, likely, sure, figures, mean, attained))
    return made


def _interrupted(engine: Engine, spot: Spot, times: Sequence[float]) -> Interrupted:
    own = {one.name: getattr(engine, one.name) for one in fields(engine)}
    return Interrupted(**own, failures=spot.settings([round(time, 3) for time in times]))


def _poisson(count: int, mean: float) -> float:
    return math.exp(-mean) * mean**count / math.factorial(count)


def _at_least(count: int, mean: float) -> float:
    return 1.0 - sum(_poisson(fewer, mean) for fewer in range(count))
