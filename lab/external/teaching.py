"""The lessons of measured engines about engines in general: the file behind every blind prediction.

`python -m lab.external.teaching --data DIR` fits the levels of `calibration.steps.evidence` to all cases and writes the
bundled file. *No run is predicted with what it taught*: the file has each source's evidence separately, so that any
source can be left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from calibration.steps.evidence import Evidence
from calibration.steps.predict import bundled_evidence
from calibration.validation.external.case import Case, load_cases
from lab.external.cases import FOLDER
from lab.external.fitting import fit, likeliest
from lab.external.leave_out import leave_out, missed, table
from lab.external.lessons import Lesson, lessons

_KEPT = Path(__file__).parents[2] / "calibration" / "steps" / "blind.json"


def all_lessons(cases: Sequence[Case], data: Path, say: Callable[[str], None]) -> list[Lesson]:
    """Return the lessons of every case; runs that cannot be represented are counted by reason."""
    every: list[Lesson] = []
    for case in cases:
        taken, skipped = lessons(case, data)
        every += taken
        say(f"{case.name}: {len(taken)} runs")
        for why in dict.fromkeys(skipped):
            say(f"  {skipped.count(why)} left out: {why}")
    return every


def teach(taken: Sequence[Lesson], say: Callable[[str], None]) -> Evidence:
    """Return the evidence of the lessons, with its most probable spreads and errors on left-out sources."""
    evidence = fit(taken, say=say)
    evidence = fit(taken, likeliest(evidence), say=say)
    scored = leave_out(taken, evidence, "source")
    return replace(evidence, missed=missed(scored))


def left_out_tables(
    cases: Sequence[Case], data: Path, levels: Sequence[str], say: Callable[[str], None]
) -> dict[str, list[tuple[str, ...]]]:
    """Return for each level the table of `leave_out.table`."""
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
