"""A run simulated as it was (the baseline), and the measure that compares changed simulations of it with the baseline.

If nearly every request finishes, the measure is the 99th percentile of each latency over the requests that finished in
the baseline. A request that no longer finishes has an infinite latency. If more than one in a hundred requests is lost,
such a percentile over all requests is infinite, and a percentile over the finished requests only says how fast the few
admitted requests were. The measure is then the share of the lost requests that finish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.planning.diagnose.constraint_lifts import longest_request
from tokentwin.planning.diagnose.document import FINISHED
from tokentwin.planning.diagnose.overload import Overload, replicas_to_add
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.traces.metrics.client_view import as_clients_saw
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.tables import percentiles

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_GAPS = "itl_ms"
_LOST = 0.01  # share of the requests that could finish
_MOST_ADDED = 15  # replicas that are tried against the loss of requests


class Bought(NamedTuple):
    """What a change leaves and gains.

    Attributes:
        p99: the remaining p99 of each latency, in ms
        bought: share of each baseline p99 that is gained; under `finished`, the share of the lost requests that finish
        finished: share of all requests that finish
        mends: True if the run then keeps up with its arrivals, or loses no requests; None if it did so before
    """

    p99: dict[str, float]
    bought: dict[str, float]
    finished: float
    mends: bool | None


class Baseline:
    """A simulated `scenario`.

    Attributes:
        requests: the dataset `requests` of the simulated run
        p99: p99 of each latency that has a value, in ms
        finished: share of all requests that finish
        sheds: True if lost requests are to be explained; `p99` then covers the requests that finish
        overload: the overload, if the run receives more requests than it can serve and loses none
    """

    def __init__(self, scenario: PricedScenario, latencies: Sequence[str]) -> None:
        self._tokens = _GAPS in latencies
        self._fitting = _fitting(scenario)
        self.requests = scenario.requests(tokens=self._tokens)
        metrics = RunMetrics(self.requests)
        self.finished = float(metrics.finished.mean())
        self._lost = self._lost_share(self.requests, metrics)
        self.sheds = self._lost > _LOST
        self._kept = None if self.sheds else self.requests["request_id"].filter(pa.array(metrics.finished))
        p99s = self._p99s(self.requests, latencies)
        self.p99 = {name: value for name, value in p99s.items() if not math.isnan(value)}
        self.overload = None if self.sheds else Overload.of(scenario, metrics.saturation, metrics.outstanding[1])

    def against(self, scenario: PricedScenario) -> Bought:
        """Return what another scenario of the same requests gains."""
        requests = scenario.requests(tokens=self._tokens)
        p99 = self._p99s(requests, tuple(self.p99))
        bought = {name: 1 - p99[name] / before if before > 0 else 0.0 for name, before in self.p99.items()}
        metrics = RunMetrics(requests)
        if self.sheds:
            bought[FINISHED] = 1 - self._lost_share(requests, metrics) / self._lost
        broken = self.sheds or self.overload is not None
        return Bought(p99, bought, float(metrics.finished.mean()), self._mended(requests) if broken else None)

    def replicas_to_add(self, scenario: PricedScenario) -> int | None:
        """Return the smallest number of replicas that mends a run that is overloaded or loses requests.

        Returns None if the run needs no mending, or if replicas do not mend it.
        """
        if self.overload is not None:
            return replicas_to_add(scenario, self.overload.lacking(scenario), self.overload.ample, self._mended)
        return replicas_to_add(scenario, 1, _MOST_ADDED, self._mended) if self.sheds else None

    def _mended(self, requests: pa.Table) -> bool:
        metrics = RunMetrics(requests)
        if self._lost_share(requests, metrics) > _LOST:
            return False
        return self.overload is None or not self.overload.piles_up(metrics.saturation)

    def _lost_share(self, requests: pa.Table, metrics: RunMetrics) -> float:
        """Return the lost share of the requests that could finish."""
        could = np.isin(requests["request_id"].to_numpy(), self._fitting)
        return float((~metrics.finished[could]).mean()) if could.any() else 0.0

    def _p99s(self, requests: pa.Table, latencies: Sequence[str]) -> dict[str, float]:
        """Return the p99 of each latency as clients saw it; NaN if there is no value."""
        requests = as_clients_saw(requests)
        if self._kept is not None:
            requests = requests.filter(pc.is_in(requests["request_id"], self._kept.combine_chunks()))
        metrics = RunMetrics(requests)
        p99s = {}
        for name in latencies:
            values = metrics.values(name)
            if self._kept is not None and name != _GAPS:
                values = np.where(metrics.finished, values, np.inf)
            values = values[~np.isnan(values)]  # a request with one output token has no TPOT: NaN
            p99s[name] = percentiles(values, (99,))[0] if len(values) else math.nan
        return p99s


def _fitting(scenario: PricedScenario) -> np.ndarray:
    """Return the ids of the requests that fit into the model or a pool's limit; no lift changes whether they fit."""
    deployments = [scenario.deployment, *(pool.deployment for pool in scenario.pools or ())]
    stated = (deployment.scheduler.max_model_len for deployment in deployments)
    longest = max(longest_request(scenario), *stated)
    requests = scenario.workload.requests
    return np.array([r.id for r in requests if r.prompt_len + r.output_limit <= longest], dtype=np.int64)
