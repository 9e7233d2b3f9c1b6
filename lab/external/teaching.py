"""The fit of the evidence behind every blind prediction to the measured runs of all cases.

`python -m lab.external.teaching --data DIR` fits the levels of `calibration.steps.evidence` by the Gauss-Newton method,
and writes the bundled file. *No run is predicted with evidence from itself*: the file has each source's evidence
separately, so that any source can be left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibration.steps.evidence import LEVELS, NOISE, NUMBERS, Evidence, Origin, Spreads, Taught
from calibration.steps.external_calibration import bundled_evidence
from calibration.validation.external.case import Case, load_cases
from lab.external.cases import FOLDER
from lab.external.leave_out import leave_out, missed, table
from lab.external.lessons import Lesson, lessons

Floats = NDArray[np.float64]

_OUTLIER = 0.25  # larger log errors count less and less, because queueing amplifies them
_ALIKE = 20  # number of rows of one source beyond which more rows add no weight
_ROUNDS = 5
_FURTHEST = 1.0  # maximum change of a number's logarithm in a round
_GRID = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
_GIVEN = {
    "version": 0.1,
    "client": 0.5,
    "client and model": 0.5,
}  # nearly a level for each source: docs/cost-model.md
START: Spreads = dict.fromkeys(LEVELS, 0.5) | _GIVEN


@dataclass(frozen=True)
class Linearised:
    """The measured runs linearised at each origin's `logs`: log errors, slopes, and the weight of each figure."""

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
    """Return the evidence fitted to the runs `lessons`, or the bundled evidence if none can be used.

    Runs with a caution and runs of fleets are not used.
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
    """Return the spreads of the levels under which the evidence is most probable, chosen one by one from a grid.

    The spreads of versions and clients are fixed: they would explain any difference between one source and the others.
    """
    spreads = dict(evidence.spreads)
    for _ in range(2):
        for level in [name for name in spreads if name not in _GIVEN]:
            spreads[level] = max(_GRID, key=lambda s: Evidence(evidence.taught, {**spreads, level: s}).log_evidence)
    return spreads


_KEPT = Path(__file__).parents[2] / "calibration" / "steps" / "blind.json"


def all_lessons(cases: Sequence[Case], data: Path, say: Callable[[str], None]) -> list[Lesson]:
    """Return the measured runs of every case; tell how many cannot be represented, by reason."""
    every: list[Lesson] = []
    for case in cases:
        taken, skipped = lessons(case, data)
        every += taken
        say(f"{case.name}: {len(taken)} runs")
        for why in dict.fromkeys(skipped):
            say(f"  {skipped.count(why)} left out: {why}")
    return every


def teach(taken: Sequence[Lesson], say: Callable[[str], None]) -> Evidence:
    """Return the evidence fitted to the runs `taken`, with its most probable spreads and errors on left-out sources."""
    evidence = fit(taken, say=say)
    evidence = fit(taken, likeliest(evidence), say=say)
    scored = leave_out(taken, evidence, "source")
    return replace(evidence, missed=missed(scored))


def left_out_tables(
    cases: Sequence[Case], data: Path, levels: Sequence[str], say: Callable[[str], None]
) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of `leave_out.table` for each level."""
    taken = all_lessons(cases, data, say)
    evidence = fit(taken, bundled_evidence().spreads, say)
    return {level: list(table(leave_out(taken, evidence, level))) for level in levels}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="../shared/data", type=Path)
    parser.add_argument("--write", default=_KEPT, type=Path)
    given = parser.parse_args()
    cases = [case for case in load_cases(FOLDER) if not case.only_named]  # others take too long for few rows
    evidence = teach(all_lessons(cases, given.data, print), print)
    given.write.write_text(json.dumps(evidence.as_dict()) + "\n", encoding="utf-8")
    print(f"spreads {evidence.spreads}")


if __name__ == "__main__":
    main()
