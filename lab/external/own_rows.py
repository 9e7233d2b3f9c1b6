"""Errors of rows that are predicted with a few measured rows of the same deployment, as users predict their own.

A deployment's source is left out of the evidence first. Then some of its rows, drawn at random, join the evidence, and
predict the others. The width of a band is the one that rows of other sources needed with as many own rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.steps.evidence import NOISE, OWN_ROWS, Belief, Evidence
from calibration.validation.external.predicted_run import FIGURES, PredictedRun, taught

_DRAWS = 3
_MORE = 2  # minimum number of rows that are predicted
_ROUNDS = 2
_COVERED = 0.92  # as in `evidence.reach_of`


@dataclass(frozen=True)
class OwnError:
    """The error of one figure of one row, predicted with `own_rows` rows of its deployment.

    Attributes:
        error: logarithm of predicted over measured
        sigma: standard deviation of the error, by the evidence
    """

    source: str
    figure: str
    own_rows: int
    error: float
    sigma: float


def own_errors(runs: Sequence[PredictedRun], evidence: Evidence) -> list[OwnError]:
    """Return the errors of all rows of deployments that have enough rows, for each number of own rows and draw."""
    errors: list[OwnError] = []
    left: dict[str, Evidence] = {}
    for rows in _deployments(runs):
        origin = rows[0].origin
        if origin.source not in left:
            left[origin.source] = evidence.without(lambda other, source=origin.source: other.source == source)  # type: ignore[misc]
        blind = left[origin.source].belief(origin)
        for count in (0, *OWN_ROWS):
            for draw in range(_DRAWS if count else 1):
                errors += _predicted(rows, count, draw, blind)
    return errors


def _deployments(runs: Sequence[PredictedRun]) -> Iterator[list[PredictedRun]]:
    """Yield the closed-loop rows of each deployment; rows that a caution is about are left out."""
    groups: dict[Any, list[PredictedRun]] = {}
    for run in runs:
        usable = run.steps is None and run.figures == FIGURES and not run.measured_run.caution
        if usable and run.measured_run.workload.concurrency and run.deployment.fleet is None:
            drafts = run.deployment.scheduler.speculative
            layout = run.deployment.tensor_parallel_size, run.deployment.data_parallel_size
            key = run.origin, layout, run.deployment.enable_expert_parallel, drafts is not None
            groups.setdefault(key, []).append(run)
    return (rows for rows in groups.values() if len(rows) >= max(OWN_ROWS) + _MORE)


def _predicted(rows: Sequence[PredictedRun], count: int, draw: int, blind: Belief) -> Iterator[OwnError]:
    """Yield the errors of the other rows, when `count` rows drawn at random have joined the belief."""
    chosen = set(random.Random(f"{rows[0].origin} {count} {draw}").sample(range(len(rows)), count))
    own = [row for at, row in enumerate(rows) if at in chosen]
    belief = blind
    for _ in range(_ROUNDS if own else 0):
        belief = blind.updated(taught(rows[0].origin, own, belief.logs))
    for row in (row for at, row in enumerate(rows) if at not in chosen):
        predicted, slopes = row.predicted(belief.logs)
        errors = np.log(predicted / row.measured).tolist()
        for figure, error, slope in zip(row.figures, errors, slopes, strict=True):
            sigma = float(np.sqrt(belief.variance(slope) + NOISE[figure] ** 2))
            yield OwnError(row.origin.source, figure, count, error, sigma)


def own_reach(errors: Sequence[OwnError]) -> Mapping[str, list[float]]:
    """Return, for each figure and each number in `OWN_ROWS`, the standard deviations that contain 90 % of the rows."""
    return {
        figure: [_reach([e for e in errors if e.figure == figure and e.own_rows == count]) for count in OWN_ROWS]
        for figure in FIGURES
    }


def _reach(errors: Sequence[OwnError]) -> float:
    """Return a quantile of the errors in standard deviations, in which every source has the same weight."""
    by_source: dict[str, list[float]] = {}
    for e in errors:
        by_source.setdefault(e.source, []).append(abs(e.error) / e.sigma)
    misses = np.concatenate(list(map(np.array, by_source.values())))
    weights = np.concatenate([np.full(len(own), 1 / len(own)) for own in by_source.values()])
    order = np.argsort(misses, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    return round(float(misses[order][min(int(np.searchsorted(share, _COVERED)), len(misses) - 1)]), 3)


HEADER = ("own rows", "rows predicted", "TPOT off, %", "TTFT off, %", "TPOT in band, %", "TTFT in band, %")


def own_table(errors: Sequence[OwnError]) -> Iterator[tuple[str, ...]]:
    """Yield rows under `HEADER`: median absolute errors, and shares within bands whose width other sources gave."""
    for count in (0, *OWN_ROWS):
        mine = [e for e in errors if e.own_rows == count]
        parts = [[e for e in mine if e.figure == figure] for figure in FIGURES]
        medians = (f"{100 * float(np.median([abs(np.expm1(e.error)) for e in part])):.1f}" for part in parts)
        covered = (f"{100 * _covered(part):.0f}" for part in parts)
        yield str(count), f"{len(mine) // len(FIGURES):,}", *medians, *covered


def _covered(errors: Sequence[OwnError]) -> float:
    """Return the share of errors within the reach that the other sources' errors needed."""
    within = []
    for source in sorted({e.source for e in errors}):
        reach = _reach([e for e in errors if e.source != source])
        within += [abs(e.error) <= reach * e.sigma for e in errors if e.source == source]
    return float(np.mean(within))
