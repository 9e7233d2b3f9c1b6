"""Errors of rows predicted without their group: a GPU, an engine, a model or a source is left out in turn.

Every row is predicted by a fit that never saw its group. The width of its band follows from the errors of the other
groups' rows, which are predicted in the same way; the groups that are most like its own count most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.evidence import NOISE, Belief, Evidence, Missed, Origin, reach_of
from tokentwin.calibration.steps.external_calibration import correction_of
from tokentwin.calibration.trust import TrustLevel
from tokentwin.calibration.validation.external.predicted_run import FIGURES, PredictedRun
from tokentwin.serving.deployments.gpu_spec import find_gpu

Floats = NDArray[np.float64]

GROUPS: Mapping[str, Callable[[Origin], str]] = {
    "gpu": lambda origin: origin.gpu,
    "engine": lambda origin: origin.engine,
    "model": lambda origin: origin.model,
    "source": lambda origin: origin.source,
}
MANY = 30  # minimum number of rows of a GPU under an engine that are shown separately
_KEPT = 40  # maximum number of quantiles kept of an origin's errors


@dataclass(frozen=True)
class Scored:
    """A figure of a row, predicted by the evidence of the other groups.

    Attributes:
        error: logarithm of predicted over measured
        sigma: standard deviation of the error, by the evidence of the other groups
        level: trust level that a user sees
        reach: half-width of the band, in the logarithm
    """

    run: PredictedRun
    figure: str
    group: str
    error: float
    sigma: float
    level: TrustLevel = TrustLevel.UNKNOWN
    reach: float = 0.0

    @property
    def predicted(self) -> float:
        """The prediction in milliseconds, like the measurement."""
        return float(np.exp(self.error)) * self.run.measured_run.figures[self.figure]

    @property
    def off(self) -> float:
        """The absolute error as a share of the measurement."""
        return abs(float(np.expm1(self.error)))

    @property
    def covered(self) -> bool:
        return abs(self.error) <= self.reach


def leave_out(runs: Sequence[PredictedRun], evidence: Evidence, by: str) -> list[Scored]:
    """Return every figure of the measured runs, predicted without its group; `by` is a kind of group in `GROUPS`."""
    group = GROUPS[by]
    left: dict[str, Evidence] = {}
    known: dict[Origin, tuple[Belief, Correction]] = {}
    scored: list[Scored] = []
    for run in runs:
        name = group(run.origin)
        if name not in left:
            left[name] = evidence.without(lambda origin, name=name: group(origin) == name)  # type: ignore[misc]
        if run.origin not in known:
            belief = left[name].belief(run.origin)
            known[run.origin] = (
                belief,
                correction_of(left[name], run.origin, belief, run.deployment, find_gpu(run.gpu)),
            )
        belief, correction = known[run.origin]
        level = run.level(correction, left[name].untaught(run.origin))
        predicted, slopes = run.predicted(belief.logs, correction)
        errors = np.log(predicted / run.measured)
        for figure, error, slope in zip(run.figures, errors.tolist(), slopes, strict=True):
            sigma = float(np.sqrt(belief.variance(slope) + NOISE[figure] ** 2))
            scored.append(Scored(run, figure, name, error, sigma, level))
    return list(_reaching(scored))


def _reaching(scored: Sequence[Scored]) -> Iterator[Scored]:
    """Yield the figures with bands; their width in standard deviations is the one that other groups' rows needed."""
    needed: dict[tuple[str, str, Origin], float] = {}
    for one in scored:
        key = one.figure, one.group, one.run.origin
        if key not in needed:
            others = [s for s in scored if s.figure == one.figure and s.group != one.group]
            needed[key] = reach_of(missed(others), one.run.origin)
        yield replace(one, reach=one.sigma * needed[key])


def missed(scored: Iterable[Scored]) -> list[Missed]:
    """Return each origin's errors in standard deviations, all versions together, without rows that have a caution."""
    return missed_by_origin(
        (one.run.origin, one.figure, abs(one.error) / one.sigma) for one in scored if not one.run.measured_run.caution
    )


def missed_by_origin(errors: Iterable[tuple[Origin, str, float]]) -> list[Missed]:
    """Return the errors (origin, figure, number of standard deviations) by origin, all versions together."""
    misses: dict[tuple[Origin, str], list[float]] = {}
    for origin, figure, miss in errors:
        misses.setdefault((replace(origin, version=""), figure), []).append(miss)
    at = (np.arange(_KEPT) + 0.5) / _KEPT
    return [
        Missed(origin, figure, len(own), np.quantile(own, at).tolist() if len(own) > _KEPT else sorted(own))
        for (origin, figure), own in misses.items()
    ]


HEADER = ("left out", "rows", "TPOT off, %", "TTFT off, %", "TPOT in band, %", "TTFT in band, %")


def table(scored: Sequence[Scored]) -> Iterator[tuple[str, ...]]:
    """Yield rows under `HEADER`: logged steps, all runs, vLLM's, each trust level and group, GPUs with many rows."""
    logged = [s for s in scored if s.run.steps is not None]
    if logged:
        yield _cells("steps of iteration logs", logged)
    scored = [s for s in scored if s.run.steps is None]
    yield _cells("all", scored)
    yield _cells("vLLM", [s for s in scored if s.run.origin.engine == "vllm"])
    for level in sorted({s.level for s in scored} - {TrustLevel.UNKNOWN}):
        yield _cells(level.word, [s for s in scored if s.level is level])
    for name in sorted({s.group for s in scored}):
        yield _cells(name, [s for s in scored if s.group == name])
    for gpu, engine in sorted({(s.run.origin.gpu, s.run.origin.engine) for s in scored}):
        mine = [s for s in scored if (s.run.origin.gpu, s.run.origin.engine) == (gpu, engine)]
        if sum(s.figure == FIGURES[0] for s in mine) >= MANY:
            yield _cells(f"of these, {gpu} under {engine}", mine)


def _cells(name: str, scored: Sequence[Scored]) -> tuple[str, ...]:
    """Return a table row: name, number of rows, median absolute errors, and shares of figures within their bands."""
    by_figure = [[s for s in scored if s.figure == figure] for figure in FIGURES]
    errors = (f"{100 * float(np.median([s.off for s in own])):.1f}" if own else "" for own in by_figure)
    within = (f"{100 * float(np.mean([s.covered for s in own])):.0f}" if own else "" for own in by_figure)
    return name, str(max(map(len, by_figure))), *errors, *within
