"""Measured runs prepared for the fit: their latencies as functions of the parameters of `calibration.steps.evidence`.

The code calls these latencies figures, the parameters numbers, and the derivatives of log figures by log numbers
slopes. A closed loop's figures are sums over steps (`schedule`), so their slopes are exact and take no simulation.
Other runs are simulated, once at the given numbers and once for each number, which is changed a little. In a log of
iterations, each kind of step is a separate run: a kind without prompts gives the time of a token, a kind with prompts
the time to a first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import Estimate, KernelTimes, Operation, StepSizes, floor_ns
from tokentwin.calibration.steps.correction import Correction, TypeFactors, step_parts
from tokentwin.calibration.steps.draft_cost import draft_passes
from tokentwin.calibration.steps.evidence import NOISE, NUMBERS, PARTS, PLACE, PRIORS, Belief, Origin, Taught
from tokentwin.calibration.steps.external_calibration import kernels, step_shares
from tokentwin.calibration.steps.iteration_fit import StepLog, read_iteration_log
from tokentwin.calibration.steps.launches import outside_graphs
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_trust import run_level, step_trust
from tokentwin.calibration.trust import TrustLevel
from tokentwin.calibration.validation.external.case import Case, origin_of
from tokentwin.calibration.validation.external.schedule import (
    SIZES,
    Schedule,
    as_run,
    is_plain_loop,
    kinds_of,
    schedule,
)
from tokentwin.calibration.validation.external.scoring import simulated_figures
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engines import captured_tokens
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import with_known_states
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec, draft_module, module_deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, common_prefix
from tokentwin.traces.measured.run import MeasuredRun

Floats = NDArray[np.float64]

FIGURES = ("tpot_ms.mean", "ttft_ms.mean")
_ATTENTION = ("decode attention", "prompt attention", "past attention")
_FEWEST_STEPS = 3  # minimum number of steps of a kind; in fewer, a spike could not be told from a usual step
_OUTLIER = 0.25  # larger log errors count less and less, because queueing amplifies them
_STEP = 0.1  # change of a number's logarithm from which the slopes of simulated figures are computed


@dataclass(frozen=True)
class PredictedRun:
    """One measured run for the fit: its origin, its measured figures, and their prediction.

    Attributes:
        steps: the one kind of step, if the run comes from an iteration log
    """

    origin: Origin
    case: Case
    measured_run: MeasuredRun
    gpu: str
    deployment: Deployment
    steps: Schedule | None = None
    _kept: dict[str, Floats] = field(default_factory=dict, compare=False)

    @property
    def figures(self) -> tuple[str, ...]:
        """The names in `FIGURES` that were measured."""
        return tuple(name for name in FIGURES if self.measured_run.figures.get(name, 0) > 0)

    @property
    def measured(self) -> Floats:
        """The measured figures in milliseconds."""
        return np.array([self.measured_run.figures[name] for name in self.figures])

    def predicted(self, logs: Floats, correction: Correction | None = None) -> tuple[Floats, Floats]:
        """Return the predicted milliseconds of each figure, and the slopes of their logarithms `[figures, numbers]`.

        `logs` are the logarithms of the numbers. A `correction` with the same numbers also has weight types of more
        bits, which an operation uses if they are faster.
        """
        if self._is_summed:
            wider = correction.by_type if correction else {}
            priced = _Priced.from_schedule(self._schedule, self, kernels(self.gpu), wider) if wider else self._summed
            return priced.predicted(logs, self.figures, self.measured_run.by_client)
        at = self._simulated(logs, kernels(self.gpu), correction)
        # computed only once: slopes take many simulations, and hardly depend on the numbers
        if "slopes" not in self._kept:
            self._kept["slopes"] = self._slopes(logs, at)
        return at, self._kept["slopes"]

    def _slopes(self, logs: Floats, at: Floats) -> Floats:
        """Return the slopes of simulated figures.

        A fleet's figures have the slopes of a single decode step and of a single prompt.
        """
        if self.deployment.fleet is None:
            beside = [self._simulated(logs + _STEP * unit, kernels(self.gpu)) for unit in np.eye(len(logs))]
            return np.asarray(np.log(np.array(beside) / at).T / _STEP)
        shares = step_shares(find_model(self.deployment.model), self.deployment, kernels(self.gpu)) * np.exp(logs)
        return np.array([shares[FIGURES.index(name)] / shares[FIGURES.index(name)].sum() for name in self.figures])

    @cached_property
    def _is_summed(self) -> bool:
        drafts = self.deployment.scheduler.speculative
        alone = self.case.replicas == 1 and self.deployment.fleet is None and (not drafts or drafts.method == "mtp")
        return self.steps is not None or (alone and is_plain_loop(self.measured_run.workload))

    @cached_property
    def _schedule(self) -> Schedule:
        return self.steps or schedule(self.measured_run.workload, self.deployment)

    @cached_property
    def _summed(self) -> _Priced:
        return _Priced.from_schedule(self._schedule, self, kernels(self.gpu))

    def level(self, correction: Correction, untaught: str) -> TrustLevel:
        """Return the trust level that a user sees for this prediction; unknown if the level would take a simulation."""
        if not self._is_summed:
            return TrustLevel.UNKNOWN
        steps, model = self._schedule, find_model(self.deployment.model)
        cost = OperationCost(model, self.deployment, kernels(self.gpu), correction, untaught=untaught)
        return run_level(step_trust(cost, steps.sizes).level, steps.tpot + steps.ttft)

    def at_roofline(self) -> Floats:
        """Return milliseconds of each figure, with every operation as fast as the datasheet allows."""
        ideal = Roofline(find_gpu(self.gpu))
        logs = np.array([-np.log(PRIORS[PLACE[name]]) if name in PARTS else -np.inf for name in NUMBERS])
        if not self._is_summed:
            return self._simulated(logs, ideal)
        priced = _Priced.from_schedule(self._schedule, self, ideal)
        return priced.predicted(logs, self.figures, self.measured_run.by_client)[0]

    def _simulated(self, logs: Floats, times: KernelTimes, correction: Correction | None = None) -> Floats:
        belief = Belief(logs, np.zeros((len(logs), len(logs))))
        model = find_model(self.deployment.model)
        cost = OperationCost(model, self.deployment, times, correction or belief.correction(""), belief.host)
        cost = cost.with_shared_prefix(common_prefix(self.measured_run.workload.requests))
        outside_ms = belief.values["request"] / 1e6 if self.measured_run.by_client else 0.0
        figures = simulated_figures(
            self.measured_run, self.deployment, cost, outside_ms, self.case.replicas, self.case.router
        )
        return np.array([figures[name] for name in self.figures])


@dataclass
class Roofline:
    """`KernelTimes` in which every operation is as fast as the datasheet allows."""

    gpu: GpuSpec

    def time(self, operation: Operation) -> Estimate:
        return Estimate(floor_ns(self.gpu, operation), 0.0, TrustLevel.EXTRAPOLATED)


class _Priced:
    """A closed loop's kinds of steps, with the nanoseconds that each number contributes to a step."""

    def __init__(
        self, gpu_ns: Floats, cpu_ns: Floats, launches: Floats, weights: dict[str, Floats], overlapped: bool
    ) -> None:
        self._gpu_ns, self._cpu_ns, self._launches = gpu_ns, cpu_ns, launches
        self._weights, self._overlapped = weights, overlapped

    @classmethod
    def from_schedule(
        cls, steps: Schedule, run: PredictedRun, times: KernelTimes, factors: TypeFactors = MappingProxyType({})
    ) -> _Priced:
        deployment, sizes = run.deployment, steps.sizes
        kinds = len(steps.dense)
        launched, captured = np.zeros(kinds), captured_tokens(deployment, find_gpu(run.gpu))
        gpu_ns, cpu_ns = np.zeros((kinds, len(NUMBERS))), np.zeros((kinds, len(NUMBERS)))
        for count, model, as_run_by, dense, sizes_of_pass in _passes(deployment, steps):
            launched += count * outside_graphs(model, as_run_by, sizes_of_pass, captured)
            for pass_sizes, of_attention in (dense, False), (sizes_of_pass, True):
                for part, ns in step_parts(model, as_run_by, times, pass_sizes, factors).items():
                    if part in PARTS and (part in _ATTENTION) == of_attention:
                        gpu_ns[:, PLACE[PARTS[part]]] += count * ns
        rows = np.asarray(sizes.decode_rows + sizes.prefill_rows)
        gpu_ns[:, PLACE["step"]] = PRIORS[PLACE["step"]]
        gpu_ns[:, PLACE["decode row"]] = PRIORS[PLACE["decode row"]] * sizes.decode_rows
        cpu_ns[:, PLACE["host step"]] = PRIORS[PLACE["host step"]]
        cpu_ns[:, PLACE["host row"]] = PRIORS[PLACE["host row"]] * rows
        for place in set(map(PLACE.__getitem__, PARTS.values())):
            gpu_ns[:, place] *= PRIORS[place]
        weights = {"tpot_ms.mean": steps.tpot, "ttft_ms.mean": steps.ttft}
        return cls(gpu_ns, cpu_ns, launched, weights, deployment.scheduler.async_scheduling)

    def predicted(self, logs: Floats, figures: Sequence[str], by_client: bool) -> tuple[Floats, Floats]:
        """Return figures and slopes; see `PredictedRun.predicted`."""
        values = np.exp(logs)
        gpu, cpu = self._gpu_ns * values, self._cpu_ns * values
        at = PLACE["launch"]
        waits = self._launches * PRIORS[at] * values[at]
        late = gpu.sum(axis=1) < waits
        gpu = np.where(late[:, None], 0.0, gpu)
        gpu[:, at] = np.where(late, waits, 0.0)
        if self._overlapped:
            hidden = gpu.sum(axis=1) >= cpu.sum(axis=1)
            steps = np.where(hidden[:, None], gpu, cpu)
        else:
            steps = gpu + cpu
        by_number = np.array([self._weights[name] @ steps for name in figures])
        if by_client:
            request = PLACE["request"]
            for row, name in zip(by_number, figures, strict=True):
                row[request] = PRIORS[request] * values[request] * name.startswith("ttft")
        whole = by_number.sum(axis=1)
        return whole / 1e6, by_number / whole[:, None]


def _passes(
    deployment: Deployment, steps: Schedule
) -> Iterator[tuple[int, ModelSpec, Deployment, StepSizes, StepSizes]]:
    """Yield the passes of each step: count, model, deployment, sizes padded for dense operations, and true sizes."""
    spec, sizes = find_model(deployment.model), steps.sizes
    yield 1, spec, deployment, _padded(sizes, steps.dense), sizes
    if drafts := deployment.scheduler.speculative:
        module, alone = draft_module(spec), module_deployment(deployment)
        for count, drafted in draft_passes(sizes, drafts):
            yield count, module, alone, _padded(drafted, as_run(np.asarray(drafted.tokens))), drafted


def _padded(sizes: StepSizes, tokens: Floats) -> StepSizes:
    """Return sizes padded to `tokens`; the padding counts as decode rows if there are any, else as prompt tokens."""
    more = tokens - sizes.tokens
    decodes = np.asarray(sizes.decode_rows) > 0
    return replace(
        sizes,
        prefill_tokens=sizes.prefill_tokens + np.where(decodes, 0.0, more),
        decode_rows=sizes.decode_rows + np.where(decodes, more, 0.0),
    )


def taught(origin: Origin, runs: Sequence[PredictedRun], logs: Floats, share: float = 1.0) -> Taught:
    """Return the normal equations of the runs of one origin, linearised at `logs`; `share` multiplies their weight."""
    information, vector, rows = np.zeros((len(logs), len(logs))), np.zeros(len(logs)), 0
    for run in runs:
        predicted, slopes = run.predicted(logs)
        errors = np.log(predicted / run.measured)
        for name, error, slope in zip(run.figures, errors, slopes, strict=True):
            weight = share / NOISE[name] ** 2 / (1.0 + (error / _OUTLIER) ** 2)
            information += weight * np.outer(slope, slope)
            vector += weight * slope * (slope @ logs - error)
            rows += 1
    return Taught(origin, information, vector, rows)


def predicted_runs(case: Case, data: Path) -> tuple[list[PredictedRun], list[str]]:
    """Return the runs that can be predicted, and why the others cannot; raise UserError for a wrong file."""
    taken, skipped = [], []
    if case.is_of_steps:
        return list(logged_runs(case, data)), []
    for run in case.format.read(data):
        if run.skipped:
            skipped.append(run.skipped)
            continue
        try:
            taken.append(predicted_run(case, run))
        except UserError as error:
            skipped.append(str(error))
    return taken, skipped


def logged_runs(case: Case, data: Path) -> Iterator[PredictedRun]:
    """Yield each kind of step in a log as a run, with its median time; raise UserError for an unreadable log."""
    deployment, _ = case.deployment_of(MeasuredRun(case.name, Workload([]), {}))
    log = read_iteration_log(data / parse(StepLog, case.measured, where=f"{case.name}.measured").file)
    sizes = {name: values for name, values in vars(log.sizes).items() if name in SIZES}
    dense, kind = kinds_of(sizes)
    for number in range(kind.max() + 1):
        mine = kind == number
        if mine.sum() < _FEWEST_STEPS:
            continue
        mean = {name: values[mine].mean(keepdims=True) for name, values in sizes.items()}
        one = np.ones(1)
        figure = FIGURES[int(mean["prefill_tokens"][0] > 0)]
        run = MeasuredRun(
            f"{case.name}, steps like {int(np.argmax(mine))}",
            Workload([]),
            {figure: float(np.median(log.measured_ns[mine])) / 1e6},
        )
        steps = Schedule(StepSizes(**mean, draft_tokens=np.zeros(1)), dense[mine].mean(keepdims=True), one, one)
        yield PredictedRun(origin_of(case, run, deployment), case, run, case.gpu, deployment, steps)


def predicted_run(case: Case, run: MeasuredRun) -> PredictedRun:
    """Return one run as a `PredictedRun`; raise UserError if it cannot be represented."""
    if run.most_workers:
        raise UserError(run.name, None, "cannot teach: its workers are searched; score its case")
    if run.skipped:
        raise UserError(run.name, None, f"cannot be simulated: {run.skipped}")
    deployment, stated = case.deployment_of(run)
    deployment = with_known_states(deployment)
    gpu = run.gpu or case.gpu
    model = find_model(deployment.model)
    if not stated:
        capacity = kv_capacity(model, find_gpu(gpu), deployment)
        capacity.check(deployment)
        deployment = deployment.rescheduled(num_blocks=capacity.num_blocks)
    predicted = PredictedRun(origin_of(case, run, deployment), case, run, gpu, deployment)
    if predicted._is_summed:
        _ = predicted._summed  # raises its errors here
    return predicted
