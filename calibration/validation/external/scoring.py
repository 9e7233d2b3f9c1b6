"""Simulations of the measured runs of a case, and comparisons with the measured figures.

The column *blind* is the predictor alone. The column *anchored* has a correction that is fitted to the case's anchor
run, which is then left out of every score. The interval spans the figures simulated at the ends of the predictor's 90 %
interval of step times. If a client measured the latencies, the interval also has the uncertainty of the client's time.
If several workloads or deployments are possible, the interval covers all, and the figures of the other deployments are
given, too. The interval of a rate is wider, as if one request more or one
fewer had been counted.

The correction of the anchored column is two factors and a constant. One factor multiplies decode steps, and the other
one multiplies the time that prompts add to a step. The constant is a time outside the engine that is added to each
request. Each of the three is fitted to one figure of the anchor run, by simulating this run repeatedly.

A run that prefills and decodes on separate workers may not state how many workers of each kind it had. It then gets the
smallest sufficient numbers of workers. A closed loop of C requests finishes C of them in the time of their output
tokens. The decode workers thus set a rate, and the prefill workers must make first tokens at this rate (rate matching,
as NVIDIA's AIConfigurator sizes such fleets). The measured times are not used for this choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median

from tokentwin.calibration.trust import Trust, least_certain
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.calibration.validation.external.case import Anchor, Case, Target
from tokentwin.calibration.validation.external.predictor import Prediction, Predictor
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import with_known_states
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.sim.router import find_router
from tokentwin.traces.measured.run import RATES, MeasuredRun, figures


def matched_workers(run: MeasuredRun, deployment: Deployment, prediction: Prediction) -> tuple[int, int]:
    """Return the numbers of prefill and decode workers.

    The number of decode workers is the smallest that can hold all requests at once. The number of prefill workers is
    the smallest that reaches the rate of the decode workers. Raises UserError if more than `run.most_workers` of one
    kind would be needed.
    """
    assert run.lengths is not None and run.workload.concurrency is not None
    (prompt, output), requests = run.lengths, run.workload.concurrency
    config, ranks, cost = deployment.scheduler, deployment.data_parallel_size, prediction.cost
    blocks = -(-(prompt + output) // config.block_size) + config.state_blocks
    places = ranks * min(config.max_num_seqs, (prediction.num_blocks - 1) // blocks)
    decode = ceil(requests / places) if places else run.most_workers + 1
    rows, context = ceil(requests / decode / ranks), prompt + output // 2  # means
    squares = rows * context**2
    token = StepPlan.from_amounts(
        decode_rows=rows, decode_context=rows * context, decode_squares=squares, sampled_rows=rows
    )
    together = max(config.max_num_batched_tokens // prompt, 1)
    first = StepPlan.from_amounts(
        prefill_rows=together,
        prefill_tokens=together * prompt,
        prefill_pairs=together * prompt * (prompt + 1) // 2,
        sampled_rows=together,
    )
    finished_per_ns = requests / (output * cost.step_ns(token))
    prefill = max(ceil(finished_per_ns * cost.step_ns(first) / (ranks * together)), 1)
    if max(prefill, decode) > run.most_workers:
        remedy = f"need {prefill} workers for prefill and {decode} for decode; raise measured.search"
        raise UserError(run.name, run.most_workers, remedy)
    return prefill, decode


_ROUNDS = 12
_CLOSE = 1e-4  # relative difference at which the anchor's figures count as reproduced


@dataclass(frozen=True)
class Correction:
    """The factors `decode` and `prefill`, and the milliseconds `overhead_ms` added to each request's TTFT and E2E."""

    decode: float = 1.0
    prefill: float = 1.0
    overhead_ms: float = 0.0


class Corrected:
    """A cost model in which decode steps are multiplied by one factor, and the time that prompts add by another.

    The factors apply to the sum of CPU time and step time. The CPU time is multiplied by the factor of decode steps.
    """

    def __init__(self, cost: CostModel, correction: Correction) -> None:
        self._cost = cost
        self._decode = correction.decode
        self._prefill = correction.prefill

    def cpu_ns(self, plan: StepPlan) -> int:
        return round(self._decode * self._cost.cpu_ns(plan))

    def step_ns(self, plan: StepPlan) -> int:
        whole = self._cost.cpu_ns(plan) + self._cost.step_ns(plan)
        decode = 0
        if plan.decode_rows:
            (decode,) = self._cost.decode_run_ns(plan.decode_rows, plan.decode_context, plan.decode_squares, 1)
        prompts = whole - decode if plan.prefill_rows else 0
        return max(round(self._decode * decode) + round(self._prefill * prompts) - self.cpu_ns(plan), 0)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        return [round(self._decode * ns) for ns in self._cost.decode_run_ns(rows, context, squares, steps)]


def fit_correction(
    anchor: Anchor, measured: Mapping[str, float], simulate: Callable[[Correction], Mapping[str, float]]
) -> Correction:
    """Return the correction with which `simulate` reproduces the `measured` figures of the anchor run.

    In every round, each factor and the constant is adjusted by the error of its own figure. Latencies of an unloaded
    run are nearly proportional to them, so this converges in a few rounds. Raises UserError for a figure that the
    anchor run does not have.
    """
    fitted = {name: figure for name in ("decode", "prefill", "overhead") if (figure := getattr(anchor, name))}
    for name, figure in fitted.items():
        if figure not in measured:
            remedy = f"is not a figure of {anchor.run}; choose one of {', '.join(measured)}"
            raise UserError(f"anchor.{name}", figure, remedy)
    correction = Correction()
    for _ in range(_ROUNDS):
        simulated = simulate(correction)
        off = {name: measured[figure] / simulated[figure] for name, figure in fitted.items()}
        if all(abs(ratio - 1) < _CLOSE for ratio in off.values()):
            break
        if "decode" in off:
            correction = replace(correction, decode=correction.decode * off["decode"])
        if "prefill" in off:
            correction = replace(correction, prefill=correction.prefill * off["prefill"])
        if "overhead" in off:
            short_ms = measured[fitted["overhead"]] - simulated[fitted["overhead"]]
            correction = replace(correction, overhead_ms=max(correction.overhead_ms + short_ms, 0.0))
    return correction


@dataclass(frozen=True)
class Row:
    """One figure of one run.

    `anchored` is None without an anchor, and `floor_pct` without repeats. `others` are the predictions for other
    deployments that it may have been, if nobody states which.
    """

    run: str
    figure: str
    measured: float
    blind: float
    low: float
    high: float
    anchored: float | None
    floor_pct: float | None
    others: Sequence[float] = ()

    @property
    def covered(self) -> bool:
        """True if the measured figure lies in the interval."""
        return self.low <= self.measured <= self.high

    def error_pct(self, column: str = "blind") -> float | None:
        """Return the error in percent of the measured value; it is 100 % if only the measured value is 0."""
        predicted = self.blind if column == "blind" else self.anchored
        if column == "nearest":
            predicted = min((self.blind, *self.others), key=lambda one: abs(one - self.measured))
        if predicted is None:
            return None
        if self.measured == 0:
            return 0.0 if predicted == 0 else 100.0
        return 100 * (predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Verdict:
    """The verdict on a target: the largest or the median absolute error in percent, and the name of its run."""

    target: Target
    error_pct: float
    run: str

    @property
    def met(self) -> bool:
        return self.error_pct <= self.target.within_pct


@dataclass(frozen=True)
class CaseResult:
    """A scored case; `levels` has the trust level of each run, and `trust` is the trust in the most uncertain run."""

    case: Case
    rows: Sequence[Row]
    verdicts: Sequence[Verdict]
    runs: Sequence[MeasuredRun]
    correction: Correction | None
    trust: Trust
    levels: Mapping[str, str]

    def median_error_pct(self, figure: str, runs: Sequence[str]) -> float | None:
        """Return the median absolute error of a figure's blind predictions over some runs."""
        names = set(runs)
        known = [row.error_pct() for row in self.rows if row.figure == figure and row.run in names]
        errors = [abs(error) for error in known if error is not None]
        return median(errors) if errors else None


def score(case: Case, data: Path, predictor: Predictor) -> CaseResult:
    """Simulate the runs of `case`, with its files in `data`; raise UserError for any fault in a file."""
    ready = [_ready(case, run, predictor) for run in case.format.read(data)]
    correction = _fit(case, ready)
    rows = []
    for one in ready:
        is_anchor = case.anchor is not None and one.run.name == case.anchor.run
        rows += _rows(one, None if is_anchor else correction)
    runs = [one.run for one in ready]
    scored = [run.name for run in runs if case.anchor is None or run.name != case.anchor.run]
    verdicts = [_judge(case, target, rows, scored) for target in case.targets]
    trusts = [one.prediction.cost.trust() for one in ready]
    levels = {run.name: trust.level for run, trust in zip(runs, trusts, strict=True)}
    return CaseResult(case, rows, verdicts, runs, correction, least_certain(trusts), levels)


def simulated_figures(
    run: MeasuredRun,
    deployment: Deployment,
    cost: CostModel,
    overhead_ms: float = 0.0,
    replicas: int = 1,
    router: str = "round-robin",
) -> dict[str, float]:
    """Return the simulated figures of `run`; `overhead_ms` is time outside the engine, before each request queues.

    Raises UserError if the simulated engine rejects requests that the measured one served.
    """
    if deployment.fleet is None:  # a case's workload is that of a single data-parallel rank
        alone = {"data_parallel_size": 1, "scheduler": deployment.staged_settings}
        deployment = deployment.model_copy(update=alone)
    metrics = run_metrics(
        run.workload, deployment, cost, replicas, None if deployment.fleet else lambda: find_router(router)
    )
    rejected = metrics.statuses().get("rejected", 0)
    if rejected:
        remedy = f"rejects {rejected} of the measured requests; check max_model_len and num_blocks"
        raise UserError(f"deployment of {run.name}", f"max_model_len {deployment.scheduler.max_model_len}", remedy)
    simulated = figures(metrics, run.offered_per_s)
    if overhead_ms:
        stretch = 1 + overhead_ms / 1e3 / simulated["makespan_s"]
        for name in simulated:
            if name.startswith(("ttft_ms.", "e2e_ms.")):
                simulated[name] += overhead_ms
            elif name == "makespan_s":
                simulated[name] *= stretch
            elif name in RATES:
                simulated[name] /= stretch
    return simulated


@dataclass(frozen=True)
class _Ready:
    """A run with all inputs of its simulation."""

    case: Case
    run: MeasuredRun
    deployment: Deployment
    prediction: Prediction
    others: Sequence[_Ready] = ()

    def simulated(self, correction: Correction | None = None) -> dict[str, float]:
        """Return the predicted figures, with or without a correction."""
        cost: CostModel = self.prediction.cost
        if correction is None:
            return self._figures(self.run, cost, self._outside_ms[1])
        return self._figures(self.run, Corrected(cost, correction), correction.overhead_ms)

    def at_ends(self) -> list[dict[str, float]]:
        """Return the figures at both ends of the interval, for every workload that the run may have had.

        The interval depends on the run's steps, so the run must be simulated at the centre first.
        """
        fast, slow = self.prediction.cost.ends()
        least_ms, _, most_ms = self._outside_ms
        runs = [self.run]
        if self.run.or_workload is not None:
            runs.append(replace(self.run, workload=self.run.or_workload))
        return [self._figures(run, cost, ms) for run in runs for cost, ms in ((fast, least_ms), (slow, most_ms))]

    @property
    def _outside_ms(self) -> tuple[float, float, float]:
        """Milliseconds that a client adds to TTFT: lower end of the 90 % interval, centre, upper end."""
        return self.prediction.request_ms if self.run.by_client else (0.0, 0.0, 0.0)

    def _figures(self, run: MeasuredRun, cost: CostModel, overhead_ms: float = 0.0) -> dict[str, float]:
        return simulated_figures(run, self.deployment, cost, overhead_ms, self.case.replicas, self.case.router)


def _ready(case: Case, run: MeasuredRun, predictor: Predictor) -> _Ready:
    if run.skipped:
        raise UserError(run.name, None, f"cannot be simulated: {run.skipped}")
    stated, has_blocks = case.deployment_of(run)
    deployment = with_known_states(stated)
    prediction = predictor(case, run, deployment)
    if run.most_workers:
        counts = matched_workers(run, deployment, prediction)
        run = replace(run, group={**run.group, "workers, searched": "{} for prefill, {} for decode".format(*counts)})
        deployment = _with_workers(deployment, counts)
        prediction = predictor(case, run, deployment)
    if not has_blocks:
        deployment = deployment.rescheduled(num_blocks=prediction.num_blocks)
    others = [_ready(case, replace(run, settings=other, or_settings=()), predictor) for other in run.or_settings]
    return _Ready(case, run, deployment, prediction, others)


def _with_workers(deployment: Deployment, counts: tuple[int, int]) -> Deployment:
    assert deployment.fleet is not None
    pools = [pool.model_copy(update={"replicas": n}) for pool, n in zip(deployment.fleet.pools, counts, strict=True)]
    return deployment.model_copy(update={"fleet": deployment.fleet.model_copy(update={"pools": tuple(pools)})})


def _fit(case: Case, ready: Sequence[_Ready]) -> Correction | None:
    if case.anchor is None:
        return None
    for one in ready:
        if one.run.name == case.anchor.run:
            return fit_correction(case.anchor, one.run.figures, one.simulated)
    names = ", ".join(one.run.name for one in ready)
    raise UserError(f"{case.name}.anchor.run", case.anchor.run, f"is not a run of this case; choose one of {names}")


def _rows(ready: _Ready, correction: Correction | None) -> list[Row]:
    measured, floors = ready.run.figures, ready.run.floor_pct
    blind = ready.simulated()
    around = [blind, *ready.at_ends()]
    others = [other.simulated() for other in ready.others]
    around += [*others, *(end for other in ready.others for end in other.at_ends())]
    one_request = 1 / sum(1 for _ in ready.run.workload.requests)
    anchored = {} if correction is None else ready.simulated(correction)
    return [
        Row(
            run=ready.run.name,
            figure=figure,
            measured=measured[figure],
            blind=blind[figure],
            low=min(predicted[figure] for predicted in around) * (1 - one_request * (figure in RATES)),
            high=max(predicted[figure] for predicted in around) * (1 + one_request * (figure in RATES)),
            anchored=anchored.get(figure),
            floor_pct=floors.get(figure),
            others=[other[figure] for other in others],
        )
        for figure in ready.case.shown
        if figure in measured and figure in blind
    ]


def _judge(case: Case, target: Target, rows: Sequence[Row], scored: Sequence[str]) -> Verdict:
    """Return the verdict on one target; raise UserError if its figure was not measured."""
    wanted = target.runs or scored
    errors = {}
    for row in rows:
        if row.figure == target.figure and row.run in wanted:
            error = row.error_pct(target.column)
            if error is not None:
                errors[row.run] = abs(error)
    if not errors or set(target.runs) - errors.keys():
        missing = ", ".join(sorted(set(target.runs) - errors.keys())) or "every run"
        remedy = f"has no {target.column} figure for {missing}; change the target"
        raise UserError(f"{case.name}.targets", target.figure, remedy)
    if target.over == "median":
        return Verdict(target, median(errors.values()), f"median of {len(errors)}")
    worst = max(errors, key=lambda run: errors[run])
    return Verdict(target, errors[worst], worst)
