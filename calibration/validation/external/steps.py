"""Rung 4 for steps: predictions of another engine's iterations, compared with its log.

The column *blind* uses no measurement of this engine. The column *anchored* has a correction fitted to the first and
the last third of the log. Both are scored on the middle third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.external_calibration import blind, kernels
from tokentwin.calibration.steps.features import REGIMES, regimes
from tokentwin.calibration.steps.iteration_fit import PricedLog, StepErrors, StepLog, middle_third, read_iteration_log
from tokentwin.calibration.steps.step_trust import interval_of, trust_within
from tokentwin.calibration.validation.external.case import Case, Target, origin_of
from tokentwin.calibration.validation.external.scoring import CaseResult, Row, Verdict
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.measured.run import MeasuredRun

_STATISTICS: dict[str, Callable[[NDArray[np.float64]], float]] = {
    "p50_ms": lambda ns: float(np.percentile(ns, 50)) / 1e6,
    "p95_ms": lambda ns: float(np.percentile(ns, 95)) / 1e6,
    "total_s": lambda ns: float(ns.sum()) / 1e9,
}


def score_steps(case: Case, data: Path) -> CaseResult:
    """Score a log in `data`; raise UserError if it cannot be read or lacks the regime of a target."""
    run = MeasuredRun(case.name, Workload([]), {})
    deployment, _ = case.deployment_of(run)
    log = read_iteration_log(data / parse(StepLog, case.measured, where=f"{case.name}.measured").file)
    priced = PricedLog(log, find_model(deployment.model), deployment, kernels(case.gpu))
    middle = middle_third(log)
    mine = origin_of(case, run, deployment).source
    known = blind(case.gpu, deployment, lambda origin: origin.source == mine)
    taught = priced.fit(~middle, f"{case.name}, first and last third")
    columns = {"blind": priced.predict(known.correction, middle), "anchored": priced.predict(taught, middle)}
    errors = {"blind": priced.score(known.correction, middle), "anchored": priced.score(taught, middle)}
    scored = log.take(middle)
    cost, corners = known.cost(find_model(deployment.model), deployment, kernels(case.gpu)), _corners(log.sizes)
    for end, decode, prompts in zip(("fast", "slow"), *interval_of(cost, corners), strict=True):
        columns[end] = priced.predict(known.correction.scaled(decode, prompts), middle)
    rows = list(_rows(scored.measured_ns, columns, regimes(scored.sizes)))
    verdicts = [_judge(case, target, errors[target.column]) for target in case.targets]
    trust = trust_within(cost, corners)
    return CaseResult(case, rows, verdicts, [], None, trust, {row.run: trust.level for row in rows})


def _rows(
    measured: NDArray[np.float64], columns: dict[str, NDArray[np.float64]], regime: NDArray[np.int64]
) -> Iterator[Row]:
    """Yield the percentiles and the sum of step times for every regime, in each column."""
    for index, name in enumerate(REGIMES):
        mine = regime == index
        if not mine.any():
            continue
        for figure, statistic in _STATISTICS.items():
            figures = {column: statistic(ns[mine]) for column, ns in columns.items()}
            run = f"{name} steps ({mine.sum()})"
            low, high = figures["fast"], figures["slow"]
            yield Row(run, figure, statistic(measured[mine]), figures["blind"], low, high, figures["anchored"], None)


def _judge(case: Case, target: Target, errors: dict[str, StepErrors]) -> Verdict:
    regime, _, statistic = target.figure.partition(".")
    if regime not in errors or statistic not in ("median", "p95"):
        raise UserError(f"{case.name}.targets", target.figure, f"must be median or p95 of {', '.join(errors)}")
    of_regime = errors[regime]
    return Verdict(
        target, of_regime.median_pct if statistic == "median" else of_regime.p95_pct, f"{of_regime.steps} steps"
    )


def _corners(sizes: StepSizes) -> list[StepSizes]:
    """Return the step with the maximum decode context, and the step with the maximum number of query-key pairs."""
    arrays = {name: np.asarray(value) for name, value in vars(sizes).items()}
    tops = (int(np.argmax(arrays[name])) for name in ("decode_context", "prefill_pairs"))
    return [StepSizes(**{name: float(values[top]) for name, values in arrays.items()}) for top in tops]
