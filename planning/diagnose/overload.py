"""Overload: the rate that a fleet can serve, and the number of replicas with which a run keeps up with its arrivals.

The backlog of every run grows while the run fills, and short runs do little else. So the growth on as many replicas as
requests could use is no overload, and is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.planning.diagnose.fleet_lifts import everyone_admitted, more_replicas
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.traffic import waits_for_answers
from tokentwin.traces.metrics.client_view import as_clients_saw
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import GROWING, Saturation, served_rate
from tokentwin.traces.tables import Floats

_AMPLE = 4  # times the replicas that the load needs: none of them has a queue


@dataclass(frozen=True)
class Overload:
    """A run that receives more requests than it can serve, in requests per second.

    Attributes:
        filling: growth of the backlog on ample replicas
        ample: number of replicas that were added to measure it; 0 if none can be added
    """

    arrival_rate: float
    served_rate: float
    filling: float
    ample: int

    @classmethod
    def of(cls, scenario: PricedScenario, saturation: Saturation | None, ends: Floats) -> Overload | None:
        """Return the overload of a simulated run; None if it keeps up, or is too short to tell.

        `ends` are the sorted times at which its requests finish, in nanoseconds.
        """
        if saturation is None or saturation.verdict != "OVERLOADED":
            return None
        served = served_rate(ends)
        if served is None or served >= saturation.arrival_rate:
            return None
        short = cls(saturation.arrival_rate, served, 0.0, 0)
        count = min(_AMPLE * (_most(scenario) + short.lacking(scenario)), len(list(scenario.workload.requests)))
        wide = more_replicas(scenario, count)
        overload = short
        if not isinstance(wide, str):
            unlimited = RunMetrics(wide.requests()).saturation
            overload = replace(short, filling=unlimited.trend.slope if unlimited else 0.0, ample=count)
        return overload if overload.piles_up(saturation) else None

    def piles_up(self, saturation: Saturation | None) -> bool:
        """Return True if the backlog of a run of the same requests grows by more than it does on ample replicas."""
        if saturation is None or not saturation.trend.rises:
            return False
        return saturation.trend.slope - self.filling >= GROWING * self.arrival_rate

    def lacking(self, scenario: PricedScenario) -> int:
        """Return the number of replicas to add by the rates alone, one or more."""
        return max(math.ceil(_most(scenario) * (self.arrival_rate / self.served_rate - 1)), 1)


def replicas_to_add(scenario: PricedScenario, guess: int, most: int, mended: Callable[[pa.Table], bool]) -> int | None:
    """Return the smallest number of added replicas, from 1 to `most`, that mends the run; None if none does.

    `mended` judges the dataset `requests` of a simulation. `guess` is tried first.
    """
    fails, mends, trial = 0, most + 1, min(guess, most)
    while mends - fails > 1:
        wide = more_replicas(scenario, trial)
        if isinstance(wide, str):
            return None
        if mended(wide.requests()):
            mends, trial = trial, trial - 1 if trial == guess else (fails + trial) // 2
        else:
            fails, trial = trial, min(2 * trial, (trial + mends) // 2)
    return mends if mends <= most else None


def drained_ns(scenario: PricedScenario) -> int | None:
    """Return the time to serve the same requests if all arrive at once, in ns: it shows the engines' capacity.

    No request is rejected. Returns None if arrivals depend on answers.
    """
    if waits_for_answers(scenario.workload):
        return None
    admitted = everyone_admitted(scenario)
    open_to_all = scenario if isinstance(admitted, str) else admitted
    at_once = [replace(request, arrival_ns=0) for request in scenario.workload.requests]
    made = replace(open_to_all, workload=replace(scenario.workload, requests=at_once)).requests()
    return pc.max(as_clients_saw(made)["finish_ns"]).as_py()


def _most(scenario: PricedScenario) -> int:
    return max(pool.replicas for pool in scenario.fleet.pools)
