"""The figures that claims are about: those of a simulated run, the highest rate that meets an SLO, and memory.

Every figure has a 90 % interval, whose ends are the figure with step times at their fast and at their slow end. If two
sides are compared, both use the same end, because the step times of both sides share their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from lab.claims.claim import Experiment
from tokentwin.calibration.operations import Elementwise, Operation, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.launches import launches
from tokentwin.calibration.trust import VALIDATED, Trust, least_certain
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import kv_dtype
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric
from tokentwin.serving.workload import Workload
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.reshape import reshaped

_ATTAINED = 0.9  # fraction of the requests that must meet the SLO
_DOUBLINGS = 10  # maximum number of times that the search doubles or halves the traffic's own rate
_NEAR = 1.25  # usual ratio between the highest rates at an end of step times and at the centre
_EXACT = 1.025  # ratio of the search's bounds at which it stops
_MOST_GPUS = 16
_Z = 1.645  # standard deviations to either end of a 90 % interval
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


class Measured(NamedTuple):
    """A figure, the ends of its interval, and the trust level of its step times with the reason."""

    value: float
    low: float
    high: float
    level: str
    reason: str


# A figure of one side with central, fast and slow step times, and the trust in the figure.
Figures = tuple[tuple[float, ...], Trust]
Known = dict[str, Any]  # results of sides that were computed before, by the side's JSON


def measured(experiment: Experiment, known: Known | None = None) -> Measured:
    """Return the figure of `experiment`; raise UserError if it cannot be measured.

    Sides that are already `known` are not measured again.
    """
    figures = [_known(_figures, side, {} if known is None else known) for side in experiment.sides]
    ways = list(figures[0][0])
    if len(figures) == 2:
        ways = [gain(experiment.figure, *pair) for pair in zip(*(ends for ends, _ in figures), strict=True)]
    return Measured(ways[0], min(ways), max(ways), *least_certain(trust for _, trust in figures))


def central(sides: Sequence[Experiment], known: Known) -> float:
    """Return one side's figure, or the factor by which the second side is better, with central step times only."""
    figures = [_known(_centre, side, known) for side in sides]
    return figures[0] if len(figures) == 1 else gain(sides[0].figure, *figures)


def gain(figure: str, baseline: float, change: float) -> float:
    """Return the factor by which the change is better."""
    name = figure.partition(".")[0]
    better_if_lower = name in _LOWER or (name not in _HIGHER and metric(name).better == "lower")
    over, under = (baseline, change) if better_if_lower else (change, baseline)
    return over / under if under else math.inf


def _known(find: Callable[[Experiment], Any], side: Experiment, known: Known) -> Any:
    key = side.model_dump_json()
    if key not in known:
        known[key] = find(side)
    return known[key]


def _figures(side: Experiment) -> Figures:
    if of_shapes := _OF_SHAPES.get(side.figure):
        return (of_shapes(side),) * 3, Trust(VALIDATED, "it follows from the shapes of model and GPU")
    if side.figure == "attention_ms":
        return _attention_ms(side)
    values: list[float] = []
    for scenario in _at_ends(side):
        values.append(_simulated(side, scenario, *values[:1]))
    return tuple(values), scenario.trust()


def _centre(side: Experiment) -> float:
    if side.figure in _OF_SHAPES or side.figure == "attention_ms":
        return _figures(side)[0][0]
    return _simulated(side, next(_at_ends(side)))


def _simulated(side: Experiment, scenario: PricedScenario, near: float = 0.0) -> float:
    """Return the figure of one simulation; a search for a highest rate starts at `near`, unless that is 0."""
    if side.figure == "request_rate":
        return _highest_rate(side, scenario, near)
    return of_run(side, *scenario.measured(side.slo, full=True))


def _at_ends(side: Experiment) -> Iterator[PricedScenario]:
    """Yield one side's scenario with central step times, and then with fast and with slow ones.

    If another run sets the arrival rate, that run is simulated at the same end of step times.
    """
    scenario = scenario_of(side)
    other = side.paced_by and scenario_of(side.paced_by)

    def paced(end: PricedScenario, other: PricedScenario | None) -> PricedScenario:
        if other is None:
            return end
        return replace(end, workload=as_fast_as(end.workload, other.measured({})[1]))

    yield paced(scenario, other or None)
    for at, end in enumerate(scenario.ends()):
        yield paced(end, other.ends()[at] if other else None)


def as_fast_as(workload: Workload, run: RunMetrics) -> Workload:
    """Return `workload` at the rate at which requests finished in `run`."""
    return reshaped(workload, rate_scale=run.scalars()["request_throughput"] / _offered_rate(workload))


def _offered_rate(workload: Workload) -> float:
    """Return the arrival rate in requests a second."""
    requests = list(workload.requests)
    return len(requests) * 1e9 / (requests[-1].arrival_ns - requests[0].arrival_ns)


def scenario_of(side: Experiment) -> PricedScenario:
    """Return one side's traffic, its deployment, and the times of its steps."""
    if side.offered is None:
        raise UserError("experiment.offered", None, f"is missing; figure {side.figure} is measured under traffic")
    return price_scenario(side.offered.workload(), None, side.gpu, side.serves, side.replicas, side.router)


def of_run(side: Experiment, requests: pa.Table, run: RunMetrics) -> float:
    """Return a metric of a run, over all its requests or over those with short prompts."""
    if side.longest_prompt is not None:
        run = RunMetrics(requests.filter(pc.less_equal(requests["prompt_tokens"], side.longest_prompt)), slo=side.slo)
    name, _, statistic = side.figure.partition(".")
    value: Any
    if statistic in _PERCENTILES and metric(name).scope in ("request", "token"):
        value = getattr(run.distribution(name), statistic)
    else:
        value = run.scalars().get(side.figure)
    if value is None or math.isnan(value):
        known = f"a metric with one of {', '.join(_PERCENTILES)}, one of a run, request_rate, {', '.join(_OF_SHAPES)}"
        raise UserError("experiment.figure", side.figure, f"is not measured there; give {known}")
    return float(value)


def _highest_rate(side: Experiment, scenario: PricedScenario, near: float) -> float:
    """Return the highest rate, in requests/s, at which nine in ten requests meet the SLO, by bisection to 2 %.

    Raises UserError if the requests meet the SLO at every rate, so that there is no highest rate.
    """
    if not side.slo:
        raise UserError("experiment.slo", None, "is missing; request_rate is the highest rate that keeps it")
    offered = _offered_rate(scenario.workload)

    def keeps(scale: float) -> bool:
        _, run = replace(scenario, workload=reshaped(scenario.workload, rate_scale=scale)).measured(side.slo)
        return bool((run.scalars()["slo_attainment"] or 0.0) >= _ATTAINED)

    scale, factor = (near / offered, _NEAR) if near else (1.0, 2.0)
    up = keeps(scale)
    for _ in range(round(_DOUBLINGS / math.log2(factor))):
        beyond = scale * factor if up else scale / factor
        if keeps(beyond) != up:
            low, high = sorted((scale, beyond))
            break
        scale = beyond
    else:
        if not up:
            return 0.0
        remedy = "are kept however fast the requests come; tighten them, or offer more requests"
        raise UserError("experiment.slo", side.slo, remedy)
    while high > _EXACT * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low * offered


def _attention_ms(side: Experiment) -> Figures:
    """Return the ms of one prompt's attention (`tokens` tokens) in all layers, with the ends of its 90 % interval."""
    cost = predicted_cost(side.gpu, side.serves)
    operations = explain(cost, uniform_step(0, 0, 1, side.tokens, 0, 0)).operations
    mine = [one for one in operations if one.name.startswith("prefill attention")]
    ends = (sum(one.ns * math.exp(z * one.sigma) for one in mine) / 1e6 for z in (0.0, -_Z, _Z))
    worst = max(mine, key=lambda one: one.level)
    return tuple(ends), worst.trust


def _decode_step(side: Experiment) -> list[Operation]:
    """Return the operations of a step that decodes one sequence of `tokens`."""
    return step_operations(find_model(side.serves.model), side.serves, uniform_step(1, side.tokens, 0, 0, 0))


def _activations_mb(side: Experiment) -> float:
    """Return the MB that norms, rotary embedding and activations move in a decode step of one sequence."""
    return sum(float(one.count * one.bytes) for one in _decode_step(side) if isinstance(one, Elementwise)) / 1e6


def _kv_gb(side: Experiment) -> float:
    """Return the GB of KV of one sequence of `tokens`."""
    served = side.serves
    return find_model(served.model).kv_bytes_per_token(int(DTYPE_BYTES[kv_dtype(served)])) * side.tokens / 1e9


def _heads_a_kv_head(side: Experiment) -> float:
    """Return the number of query heads per KV head: the factor by which grouped-query attention shrinks KV."""
    model = find_model(side.serves.model)
    return model.num_heads / model.num_kv_heads


def _gpus(side: Experiment) -> float:
    """Return the smallest number of GPUs, a power of two, that can hold the weights and one sequence of `tokens`."""
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


_OF_SHAPES: dict[str, Callable[[Experiment], float]] = {
    "kernels": lambda side: float(launches(_decode_step(side))),
    "activations_mb": _activations_mb,
    "kv_gb": _kv_gb,
    "heads_a_kv_head": _heads_a_kv_head,
    "gpus": _gpus,
}
_HIGHER = ("request_rate",)
_LOWER = ("attention_ms", "kernels", "activations_mb")
