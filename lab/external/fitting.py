"""The fit of the levels of `calibration.steps.evidence` to measured runs, by Gauss and Newton's method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.steps.evidence import LEVELS, NOISE, NUMBERS, Evidence, Origin, Spreads, Taught
from calibration.steps.predict import bundled_evidence
from lab.external.lessons import Lesson

Floats = NDArray[np.float64]

_OUTLIER = 0.25  # larger log errors count less and less, because queueing amplifies
_ALIKE = 20  # rows of one source beyond which more of them add nothing
_ROUNDS = 5
_FURTHEST = 1.0  # logarithm by which a number may move in a round
_GRID = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
_GIVEN = {
    "version": 0.1,
    "client": 0.5,
    "client and model": 0.5,
}  # nearly a level for each source: docs/cost-model.md
START: Spreads = dict.fromkeys(LEVELS, 0.5) | _GIVEN


@dataclass(frozen=True)
class Linearised:
    """The lessons at numbers `logs` of each origin: log errors, slopes, and the weight of each figure."""

    lessons: Sequence[Lesson]
    logs: Mapping[Origin, Floats]

    def taught(self) -> list[Taught]:
        """Return the normal equations of every origin."""
        taught, rows_of = [], Counter(lesson.origin.source for lesson in self.lessons)
        for origin, at in self.logs.items():
            information, vector, rows = np.zeros((len(at), len(at))), np.zeros(len(at)), 0
            mine = [lesson for lesson in self.lessons if lesson.origin == origin]
            share = min(1.0, _ALIKE / rows_of[origin.source])
            for lesson in mine:
                predicted, slopes = lesson.predicted(at)
                errors = np.log(predicted / lesson.measured)
                for name, error, slope in zip(lesson.figures, errors, slopes, strict=True):
                    weight = 1.0 / NOISE[name] ** 2 / (1.0 + (error / _OUTLIER) ** 2) * share
                    information += weight * np.outer(slope, slope)
                    vector += weight * slope * (slope @ at - error)
                    rows += 1
            taught.append(Taught(origin, information, vector, rows))
        return taught


def fit(lessons: Sequence[Lesson], spreads: Spreads = START, say: Callable[[str], None] | None = None) -> Evidence:
    """Return the evidence of the lessons, or the bundled evidence if there are none.

    Lessons with a caution or a fleet teach nothing.
    """
    alone = [lesson for lesson in lessons if not lesson.run.caution and lesson.deployment.fleet is None]
    used = [lesson for lesson in alone if lesson.figures]
    if not used:
        return bundled_evidence()
    logs = {origin: np.zeros(len(NUMBERS)) for origin in dict.fromkeys(lesson.origin for lesson in used)}
    evidence = Evidence([], spreads)
    for round_ in range(_ROUNDS):
        evidence = Evidence(Linearised(used, logs).taught(), spreads)
        moved_to = {origin: evidence.belief(origin).logs for origin in logs}
        moved = max(float(np.abs(moved_to[origin] - logs[origin]).max()) for origin in logs)
        logs = {origin: np.clip(moved_to[origin], at - _FURTHEST, at + _FURTHEST) for origin, at in logs.items()}
        if say:
            say(f"round {round_}: numbers moved by {moved:.3f} at most")
    return evidence


def likeliest(evidence: Evidence) -> dict[str, float]:
    """Return the spreads of the levels under which the evidence is most probable, each in turn from a grid.

    The spreads of versions and clients are given: they would explain any difference between one source and the others.
    """
    spreads = dict(evidence.spreads)
    for _ in range(2):
        for level in [name for name in spreads if name not in _GIVEN]:
            spreads[level] = max(_GRID, key=lambda s: Evidence(evidence.taught, {**spreads, level: s}).log_evidence)
    return spreads
