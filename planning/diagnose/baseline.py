"""A run simulated as it was, and what another simulation of it is held against.

Where nearly every request finishes, that is the 99th percentile of each latency over the requests that finished as it
was; one that finishes no longer takes for ever. Where more than one in a hundred comes to nothing, such a percentile of
all requests is beyond all numbers, and one over those that finish says how fast the few were that were let in. It is
then the share of the lost requests that finish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from planning.diagnose.constraint_lifts import longest_request
from planning.diagnose.document import FINISHED
from planning.diagnose.fleet_lifts import everyone_admitted
from planning.priced_scenario import PricedScenario
from planning.traffic import waits_for_answers
from traces.client_view import as_clients_saw
from traces.distribution import percentiles
from traces.run_metrics import RunMetrics

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_GAPS = "itl_ms"
_LOST = 0.01  # of the requests that could finish


class Bought(NamedTuple):
    """What is left of each `p99` in ms, the share of it that is `bought`, and the share of all requests that finish.

    Under `finished`, `bought` is the share of the lost requests that finish.
    """

    p99: dict[str, float]
    bought: dict[str, float]
    finished: float


class Baseline:
    """`scenario`, simulated.

    requests    the dataset of its recording
    p99         in ms, of those latencies that it has
    finished    the share of all requests that finish
    sheds       whether lost requests are what there is to explain; `p99` is then over the requests that finish
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
        found = self._p99s(self.requests, latencies)
        self.p99 = {name: value for name, value in found.items() if not math.isnan(value)}

    def against(self, scenario: PricedScenario) -> Bought:
        """What another scenario of the same requests buys."""
        requests = scenario.requests(tokens=self._tokens)
        p99 = self._p99s(requests, tuple(self.p99))
        bought = {name: 1 - p99[name] / before if before > 0 else 0.0 for name, before in self.p99.items()}
        metrics = RunMetrics(requests)
        if self.sheds:
            bought[FINISHED] = 1 - self._lost_share(requests, metrics) / self._lost
        return Bought(p99, bought, float(metrics.finished.mean()))

    @staticmethod
    def drained_ns(scenario: PricedScenario) -> int | None:
        """How long the same requests take if all are there at once: what the engines can do, whatever the load.

        Nobody is turned away. None where arrivals depend on answers.
        """
        if waits_for_answers(scenario.workload):
            return None
        admitted = everyone_admitted(scenario)
        open_to_all = scenario if isinstance(admitted, str) else admitted
        at_once = [replace(request, arrival_ns=0) for request in scenario.workload.requests]
        made = replace(open_to_all, workload=replace(scenario.workload, requests=at_once)).requests()
        return pc.max(as_clients_saw(made)["finish_ns"]).as_py()

    def _lost_share(self, requests: pa.Table, metrics: RunMetrics) -> float:
        """Of the requests that could finish, the share that does not."""
        could = np.isin(requests["request_id"].to_numpy(), self._fitting)
        return float((~metrics.finished[could]).mean()) if could.any() else 0.0

    def _p99s(self, requests: pa.Table, latencies: Sequence[str]) -> dict[str, float]:
        """As clients saw them; NaN where there is no value."""
        requests = as_clients_saw(requests)
        if self._kept is not None:
            requests = requests.filter(pc.is_in(requests["request_id"], self._kept.combine_chunks()))
        metrics = RunMetrics(requests)
        found = {}
        for name in latencies:
            values = metrics.values(name)
            if self._kept is not None and name != _GAPS:
                values = np.where(metrics.finished, values, np.inf)
            values = values[~np.isnan(values)]  # NaN: one output token has no TPOT
            found[name] = percentiles(values, (99,))[0] if len(values) else math.nan
        return found


def _fitting(scenario: PricedScenario) -> np.ndarray:
    """The ids of the requests that are no longer than the model or a pool takes: no lift changes that."""
    deployments = [scenario.deployment, *(pool.deployment for pool in scenario.pools or ())]
    stated = (deployment.scheduler.max_model_len for deployment in deployments)
    longest = max(longest_request(scenario), *stated)
    requests = scenario.workload.requests
    return np.array([r.id for r in requests if r.prompt_len + r.output_limit <= longest], dtype=np.int64)
