"""Errors of rows that are predicted with a few measured rows of the same deployment, as users predict their own.

A deployment's source is left out of the evidence first. Then some of its rows, drawn at random, join the evidence, and
predict the others. The width of a band is the one that rows of other sources needed with as many own rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.external.leave_out import missed_by_origin
from tokentwin.calibration.steps.evidence import NOISE, OWN_ROWS, Belief, Evidence, Missed, Origin, reach_of
from tokentwin.calibration.validation.external.predicted_run import FIGURES, PredictedRun, taught

_DRAWS = 3
_MORE = 2  # minimum number of rows that are predicted
_ROUNDS = 2


@dataclass(frozen=True)
class OwnError:
    """The error of one figure of one row, predicted with `own_rows` rows of its deployment.

    Attributes:
        error: logarithm of predicted over measured
        sigma: standard deviation of the error, by the evidence
    """

    origin: Origin
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
            yield OwnError(row.origin, figure, count, error, sigma)


def own_missed(errors: Sequence[OwnError], own_rows: int) -> list[Missed]:
    """Return the errors in standard deviations with `own_rows` rows, by origin."""
    mine = (e for e in errors if e.own_rows == own_rows)
    return missed_by_origin((e.origin, e.figure, abs(e.error) / e.sigma) for e in mine)


def own_rows_name(count: int) -> str:
    """Return the name of a row of `own_table`."""
    return f"own rows: {count}"


def own_table(errors: Sequence[OwnError]) -> Iterator[tuple[str, ...]]:
    """Yield rows under `leave_out.HEADER`: a row for each number of own rows, with all draws.

    Bands are as wide as the errors of other sources were with as many own rows.
    """
    for count in (0, *OWN_ROWS):
        mine = [e for e in errors if e.own_rows == count]
        parts = [[e for e in mine if e.figure == figure] for figure in FIGURES]
        medians = (f"{100 * float(np.median([abs(np.expm1(e.error)) for e in part])):.1f}" for part in parts)
        covered = (f"{100 * _covered(part):.0f}" for part in parts)
        yield own_rows_name(count), str(len(mine) // len(FIGURES)), *medians, *covered


def _covered(errors: Sequence[OwnError]) -> float:
    """Return the share of errors of one figure within the reach that the other sources' errors needed."""
    within = []
    for origin in dict.fromkeys(e.origin for e in errors):
        others = [e for e in errors if e.origin.source != origin.source]
        reach = reach_of(missed_by_origin((e.origin, e.figure, abs(e.error) / e.sigma) for e in others), origin)
        within += [abs(e.error) <= reach * e.sigma for e in errors if e.origin == origin]
    return float(np.mean(within))
