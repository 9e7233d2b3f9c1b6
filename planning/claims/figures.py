"""The figures that claims are about: of a simulated run, of the highest rate that keeps an SLO, and of memory.

Every figure comes with the ends of its 90 % interval: the same at the fast and at the slow end of step times, of both
sides at once where two are compared, since what is wrong with the prices of one is wrong with those of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from calibration.kernels.times import Coverage
from calibration.operations import uniform_step
from calibration.steps.explanation import explain
from calibration.steps.predict import predicted_cost
from planning.claims.claim import Experiment
from planning.priced_scenario import PricedScenario, price_scenario
from serving.deployments.dtypes import DTYPE_BYTES
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_bytes import kv_dtype
from serving.deployments.kv_capacity import kv_capacity, weight_bytes
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError
from serving.metrics import metric
from serving.workload import Workload
from traces.reshape import reshaped
from traces.run_metrics import RunMetrics

_ATTAINED = 0.9  # share of the requests that keep the SLO at a rate that counts
_DOUBLINGS = 10  # of the traffic's own rate, up or down
_HALVINGS = 5  # of the bracket: to 2 %
_MOST_GPUS = 16
_Z = 1.645  # standard deviations to either end of a 90 % interval
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


class Measured(NamedTuple):
    """A figure, the ends of its interval, and how far it can be trusted: the mark of its step times, and why."""

    value: float
    low: float
    high: float
    mark: str
    reason: str


def measured(experiment: Experiment) -> Measured:
    """The figure of `experiment`. Raises UserError where it cannot be simulated or measured."""
    of_memory = _OF_MEMORY.get(experiment.figure)
    trusted = (Coverage.VALIDATED, "it follows from the model's shapes and the GPU's memory")
    values: list[tuple[float, ...]] = []
    for side in experiment.sides:
        if of_memory:
            values.append((of_memory(side),))
        elif experiment.figure == "attention_ms":
            found, provenance = _attention_ms(side)
            values.append(found)
            trusted = max(trusted, provenance, key=lambda mark_and_reason: mark_and_reason[0])
        else:
            found, provenance = _simulated(side)
            values.append(found)
            trusted = max(trusted, provenance, key=lambda mark_and_reason: mark_and_reason[0])
    ways = values[0] if len(values) == 1 else [gain(experiment.figure, a, b) for a, b in zip(*values, strict=True)]
    mark, reason = trusted
    return Measured(ways[0], min(ways), max(ways), mark.name.lower(), reason)


def central_gain(baseline: Experiment, change: Experiment) -> float:
    """How many times better the change is, at the centre of step times."""
    found = []
    for side in (baseline, change):
        workload, scenario = scenario_of(side)
        found.append((_highest_rate if side.figure == "request_rate" else _of_a_run)(side, scenario, workload))
    return gain(change.figure, *found)


def gain(figure: str, baseline: float, change: float) -> float:
    """How many times better the change is."""
    name = figure.partition(".")[0]
    better_if_lower = name in _LOWER or (name not in _HIGHER and metric(name).better == "lower")
    over, under = (baseline, change) if better_if_lower else (change, baseline)
    return over / under if under else math.inf


def _simulated(side: Experiment) -> tuple[tuple[float, ...], tuple[Coverage, str]]:
    """The figure at the centre of step times, and at the fast and the slow end; how far these can be trusted."""
    workload, scenario = scenario_of(side)
    figure = _highest_rate if side.figure == "request_rate" else _of_a_run
    centre = figure(side, scenario, workload)
    return (centre, *(figure(side, end, workload) for end in scenario.ends())), scenario.provenance()


def scenario_of(side: Experiment) -> tuple[Workload, PricedScenario]:
    """The traffic of one side, and its deployment with what times its steps."""
    if side.offered is None:
        raise UserError("experiment.offered", None, f"is missing; figure {side.figure} is measured under traffic")
    workload = side.offered.workload()
    return workload, price_scenario(workload, None, side.gpu, side.serves, side.replicas, side.router)


def _of_a_run(side: Experiment, scenario: PricedScenario, workload: Workload) -> float:
    return of_run(side, *scenario.measured(side.slo, full=True))


def of_run(side: Experiment, requests: pa.Table, run: RunMetrics) -> float:
    """A metric of a run, of all its requests or of those with short prompts."""
    if side.longest_prompt is not None:
        run = RunMetrics(requests.filter(pc.less_equal(requests["prompt_tokens"], side.longest_prompt)), slo=side.slo)
    name, _, statistic = side.figure.partition(".")
    found: Any
    if statistic in _PERCENTILES and metric(name).scope in ("request", "token"):
        found = getattr(run.distribution(name), statistic)
    else:
        found = run.scalars().get(side.figure)
    if found is None or math.isnan(found):
        known = f"a metric with one of {', '.join(_PERCENTILES)}, one of a run, request_rate, {', '.join(_OF_MEMORY)}"
        raise UserError("experiment.figure", side.figure, f"is not measured there; give {known}")
    return float(found)


def _highest_rate(side: Experiment, scenario: PricedScenario, workload: Workload) -> float:
    """The highest rate, in requests/s, at which nine in ten requests keep the SLO: by bisection, to 2 %.

    Raises UserError where they keep it at any rate, so that it is not the rate that counts.
    """
    if not side.slo:
        raise UserError("experiment.slo", None, "is missing; request_rate is the highest rate that keeps it")
    requests = list(workload.requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9

    def keeps(scale: float) -> bool:
        _, run = replace(scenario, workload=reshaped(workload, rate_scale=scale)).measured(side.slo)
        return bool((run.scalars()["slo_attainment"] or 0.0) >= _ATTAINED)

    scale = 1.0
    up = keeps(scale)
    for _ in range(_DOUBLINGS):
        beyond = scale * 2 if up else scale / 2
        if keeps(beyond) != up:
            low, high = sorted((scale, beyond))
            break
        scale = beyond
    else:
        if not up:
            return 0.0
        remedy = "are kept however fast the requests come; tighten them, or offer more requests"
        raise UserError("experiment.slo", side.slo, remedy)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low * len(requests) / span_s


def _attention_ms(side: Experiment) -> tuple[tuple[float, ...], tuple[Coverage, str]]:
    """Attention of one prompt of `tokens`, in all layers; with the ends of what its kernels may be off by."""
    cost = predicted_cost(side.gpu, side.serves)
    operations = explain(cost, uniform_step(0, 0, 1, side.tokens, 0, 0)).operations
    mine = [one for one in operations if one.name.startswith("prefill attention")]
    ends = (sum(one.ns * math.exp(z * one.sigma) for one in mine) / 1e6 for z in (0.0, -_Z, _Z))
    worst = max(mine, key=lambda one: one.coverage)
    return tuple(ends), (worst.coverage, f"{worst.name} {worst.coverage.clause}")


def _kv_gb(side: Experiment) -> float:
    """KV of one sequence, in GB."""
    served = side.serves
    return find_model(served.model).kv_bytes_per_token(int(DTYPE_BYTES[kv_dtype(served)])) * side.tokens / 1e9


def _heads_a_kv_head(side: Experiment) -> float:
    """By how much grouped-query attention shrinks KV: query heads that share one key and value head."""
    model = find_model(side.serves.model)
    return model.num_heads / model.num_kv_heads


def _weights_gb(side: Experiment) -> float:
    served = side.serves
    return weight_bytes(find_model(served.model), served) * served.tensor_parallel_size / 1e9


def _gpus(side: Experiment) -> float:
    """The fewest GPUs, a power of two, that hold the weights and one sequence of `tokens`."""
    size = 1
    while size <= _MOST_GPUS:
        served = side.serves.model_copy(update={"tensor_parallel_size": size})
        try:
            blocks = kv_capacity(find_model(served.model), find_gpu(side.gpu), served).num_blocks
        except UserError:
            blocks = 0
        if (blocks - 1) * served.scheduler.block_size >= side.tokens:
            return size
        size *= 2
    return math.inf


_OF_MEMORY: dict[str, Callable[[Experiment], float]] = {
    "kv_gb": _kv_gb,
    "heads_a_kv_head": _heads_a_kv_head,
    "weights_gb": _weights_gb,
    "gpus": _gpus,
}
_HIGHER = ("request_rate",)
_LOWER = ("attention_ms",)
