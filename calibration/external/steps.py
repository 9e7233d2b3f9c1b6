"""Rung 4, step by step: another engine's iterations, predicted from kernels and from iterations before and after.

*Blind* knows nothing of this engine. *Anchored* has its correction fitted on the first and the last third of the log in
time; both are scored on the middle third.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from calibration.external.case import Case, Target
from calibration.external.scoring import Outcome, Row, Verdict
from calibration.external.teaching import source_of
from calibration.iteration_fit import PricedLog, StepErrors, middle_third
from calibration.iteration_log import read_iteration_log
from calibration.operations import StepSizes
from calibration.predict import blind, kernels
from calibration.step_correction import regimes
from calibration.step_features import REGIMES
from serving.config import Deployment, parse
from serving.errors import UserError
from serving.model_catalogue import find_model

_STATISTICS = (("p50_ms", 50), ("p95_ms", 95))


class StepLog(BaseModel):
    """What a case file says of a per-iteration log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["iteration-log"]
    file: str


def score_steps(case: Case, data: Path) -> Outcome:
    """Score a log under `data`. Raises UserError when it cannot be read, or a target is about no regime in it."""
    deployment = parse(Deployment, {"device": "cuda", **case.deployment}, where=f"{case.name}.deployment")
    log = read_iteration_log(data / parse(StepLog, case.measured, where=f"{case.name}.measured").file)
    priced = PricedLog(log, find_model(deployment.model), deployment, kernels(case.gpu))
    middle = middle_third(log)
    known = blind(source_of(case, deployment))
    taught = priced.fit(~middle, f"{case.name}, first and last third")
    columns = {"blind": priced.predict(known.correction, middle), "anchored": priced.predict(taught, middle)}
    errors = {"blind": priced.score(known.correction, middle), "anchored": priced.score(taught, middle)}
    found = log.take(middle)
    rows = list(_rows(found.measured_ns, columns, regimes(found.sizes), known.interval))
    verdicts = [_judge(case, target, errors[target.column]) for target in case.targets]
    cost = known.cost(find_model(deployment.model), deployment, kernels(case.gpu))
    return Outcome(case, rows, verdicts, [], None, cost.standing_of(_corners(log.sizes)))


def _rows(
    measured: NDArray[np.float64],
    columns: dict[str, NDArray[np.float64]],
    regime: NDArray[np.int64],
    interval: tuple[float, float],
) -> Iterator[Row]:
    """Percentiles of the step times of every regime, and their sum, in each column."""
    for index, name in enumerate(REGIMES):
        mine = regime == index
        if not mine.any():
            continue
        for figure, rank in _STATISTICS:
            blind_ms, anchored_ms, real_ms = (
                float(np.percentile(ns[mine], rank)) / 1e6 for ns in (columns["blind"], columns["anchored"], measured)
            )
            yield _row(f"{name} steps ({mine.sum()})", figure, real_ms, blind_ms, anchored_ms, interval)
        blind_s, anchored_s, real_s = (
            float(ns[mine].sum()) / 1e9 for ns in (columns["blind"], columns["anchored"], measured)
        )
        yield _row(f"{name} steps ({mine.sum()})", "total_s", real_s, blind_s, anchored_s, interval)


def _row(run: str, figure: str, real: float, known: float, taught: float, interval: tuple[float, float]) -> Row:
    low, high = (known * factor for factor in interval)
    return Row(run, figure, real, known, low, high, taught, None)


def _judge(case: Case, target: Target, errors: dict[str, StepErrors]) -> Verdict:
    regime, _, statistic = target.figure.partition(".")
    if regime not in errors or statistic not in ("median", "p95"):
        raise UserError(f"{case.name}.targets", target.figure, f"is not median or p95 of {', '.join(errors)}")
    found = errors[regime]
    return Verdict(target, found.median_pct if statistic == "median" else found.p95_pct, f"{found.steps} steps")


def _corners(sizes: StepSizes) -> list[StepSizes]:
    """The step of the most decode context, and that of the most query-key pairs."""
    arrays = {name: np.asarray(value) for name, value in vars(sizes).items()}
    tops = (int(np.argmax(arrays[name])) for name in ("decode_context", "prefill_pairs"))
    return [StepSizes(**{name: float(values[top]) for name, values in arrays.items()}) for top in tops]
