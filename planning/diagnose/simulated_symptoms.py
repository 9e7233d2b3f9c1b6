"""Symptoms that only simulations show: of the run with more GPUs, or with users who do not wait for answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from tokentwin.planning.diagnose.constraint_lifts import LIFTS, REPLICA, twice_the_gpus
from tokentwin.planning.diagnose.document import FINISHED, LEAST, Counterfactual, Finding, Symptom
from tokentwin.planning.diagnose.fleet_lifts import more_replicas
from tokentwin.planning.diagnose.overload import drained_ns
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.answers.figures import shown_number, shown_share, shown_time
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.client_view import as_clients_saw
from tokentwin.traces.metrics.run_metrics import RunMetrics

GOOD_BENCHMARK, NO_HELP = "good benchmark, poor product", "more GPUs do not help"
_SCALES = 0.6  # share of twice the throughput below which more GPUs do not help
_HIDDEN = 1.5  # maximum factor by which the median TTFT may be longer than in the benchmark


def good_benchmark(scenario: PricedScenario, requests: pa.Table) -> Iterator[Symptom]:
    """Yield a symptom if users who wait for their answers hide a long TTFT.

    The same rate is simulated with Poisson arrivals (seed 0). `requests` is the dataset of `scenario` as it was.
    """
    benchmark = RunMetrics(as_clients_saw(requests))
    rate, before = benchmark.scalars()["request_throughput"], benchmark.distribution("ttft_ms").p50
    if scenario.workload.concurrency is None or not rate or not before > 0:
        return
    sent = list(scenario.workload.requests)
    arrivals_ns = np.cumsum(np.random.default_rng(0).exponential(1e9 / rate, len(sent))).astype(np.int64).tolist()
    free = [replace(request, arrival_ns=ns) for request, ns in zip(sent, arrivals_ns, strict=True)]
    product = replace(scenario, workload=replace(scenario.workload, requests=free, concurrency=None))
    after = RunMetrics(as_clients_saw(product.requests())).distribution("ttft_ms").p50
    if after > _HIDDEN * before:
        text = f"{scenario.workload.concurrency:,} users wait for their answers; if {shown_number(rate)} requests/s"
        text += f" arrived independently, the median TTFT would be {shown_time(after)} instead of {shown_time(before)}"
        yield Symptom.from_finding(GOOD_BENCHMARK, Finding(1 - before / after, text))


def scaling_efficiency(scenario: PricedScenario) -> float | None:
    """Return the factor by which more GPUs raise the throughput, divided by the factor of the number of GPUs.

    The GPUs of each engine are doubled; if this is not possible, one replica is added. Returns None if arrivals depend
    on answers, or if neither is possible.
    """
    more = twice_the_gpus(scenario)
    more = more_replicas(scenario) if isinstance(more, str) else more
    if isinstance(more, str):
        return None
    before, after = drained_ns(scenario), drained_ns(more)
    return before / after / (more.gpus / scenario.gpus) if before and after else None


def more_gpus_do_not_help(tried: Sequence[Counterfactual], name: str, scaling: float | None) -> Iterator[Symptom]:
    """Yield a symptom if more GPUs hardly help; none if a run of `tried` with more of them mends an overload."""
    if any(lift.mends and lift.cause == LIFTS[REPLICA].cause for lift in tried):
        return
    replica = next(c for c in tried if c.name == REPLICA)
    helps_little = not replica.skipped and -math.inf < replica.gain(name) < LEAST
    if not helps_little and (scaling is None or scaling >= _SCALES):
        return
    wasted, reasons = 0.0, []
    if helps_little:
        gain = max(replica.gain(name), 0.0)
        wasted = 1 - gain
        what = "the unfinished requests" if name == FINISHED else f"the p99 of {metric(name).label}"
        reasons.append(f"one more replica would remove {round(100 * gain)} % of {what}")
    if scaling is not None and scaling < _SCALES:
        wasted = max(wasted, 1 - scaling)
        reasons.append(
            f"twice the GPUs serve {2 * scaling:.2f} times as much: {shown_share(scaling)} scaling efficiency"
        )
    yield Symptom.from_finding(NO_HELP, Finding(wasted, "; ".join(reasons), "" if name == FINISHED else name))
