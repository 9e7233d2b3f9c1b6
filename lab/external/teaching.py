"""The fit of the evidence behind every blind prediction to the measured runs of all cases.

`python -m lab.external.teaching --data DIR` fits the levels of `tokentwin.calibration.steps.evidence` by the
Gauss-Newton method, and writes the bundled file. *No run is predicted with evidence from itself*: the file has each
source's evidence separately, so that any source can be left out.
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

from lab.external.cases import FOLDER
from lab.external.leave_out import leave_out, missed, table
from lab.external.own_rows import own_errors, own_missed, own_table
from tokentwin.calibration.steps.evidence import (
    LEVELS,
    NUMBERS,
    OWN_ROWS,
    Evidence,
    Origin,
    Spreads,
    Taught,
    bundled_evidence,
)
from tokentwin.calibration.validation.external.case import Case, load_cases
from tokentwin.calibration.validation.external.predicted_run import PredictedRun, predicted_runs, taught

Floats = NDArray[np.float64]

_ALIKE = 20  # number of rows of one source beyond which more rows add no weight
_ROUNDS = 5
_FURTHEST = 1.0  # maximum change of a number's logarithm in a round
_GRID = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
_GIVEN = {
    "version": 0.1,
    "client": 1.0,
    "client and model": 1.0,
}  # nearly a level for each source: docs/cost-model.md
START: Spreads = dict.fromkeys(LEVELS, 0.5) | _GIVEN


@dataclass(frozen=True)
class Linearised:
    """The measured runs linearised at each origin's `logs`: log errors, slopes, and the weight of each figure."""

    runs: Sequence[PredictedRun]
    logs: Mapping[Origin, Floats]

    def taught(self) -> list[Taught]:
        """Return the normal equations of every origin."""
        rows_of = Counter(run.origin.source for run in self.runs)
        return [
            taught(
                origin,
                [run for run in self.runs if run.origin == origin],
                logs,
                min(1.0, _ALIKE / rows_of[origin.source]),
            )
            for origin, logs in self.logs.items()
        ]


def fit(runs: Sequence[PredictedRun], spreads: Spreads = START, say: Callable[[str], None] | None = None) -> Evidence:
    """Return the evidence fitted to the `runs`, or the bundled evidence if none can be used.

    Runs with a caution, runs that may have had one of several deployments, and runs of fleets are not used.
    """
    alone = [run for run in runs if run.deployment.fleet is None and not run.measured_run.or_settings]
    used = [run for run in alone if run.figures and not run.measured_run.caution]
    if not used:
        return bundled_evidence()
    logs = {origin: np.zeros(len(NUMBERS)) for origin in dict.fromkeys(run.origin for run in used)}
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


def all_runs(cases: Sequence[Case], data: Path, say: Callable[[str], None]) -> list[PredictedRun]:
    """Return the measured runs of every case; tell how many cannot be represented, by reason."""
    every: list[PredictedRun] = []
    written: set[tuple[str, ...]] = set()
    for case in cases:
        taken, skipped = predicted_runs(case, data)
        once = [run for run in taken if run.steps is not None or is_new(run, written)]
        every += once
        say(f"{case.name}: {len(once)} runs")
        if len(once) < len(taken):
            say(f"  {len(taken) - len(once)} left out: written before, to the last digit")
        for why in dict.fromkeys(skipped):
            say(f"  {skipped.count(why)} left out: {why}")
    return every


def is_new(run: PredictedRun, written: set[tuple[str, ...]]) -> bool:
    """Return whether no run before had the same figures on the same GPU, which are then noted in `written`.

    Tables have rows twice, under other parallel sizes or under another name of the model. One of them would predict the
    other.
    """
    figures = run.gpu, *(repr(value) for _, value in sorted(run.measured_run.figures.items()))
    new = figures not in written
    written.add(figures)
    return new


def teach(taken: Sequence[PredictedRun], say: Callable[[str], None]) -> Evidence:
    """Return the evidence fitted to the runs `taken`, with its most probable spreads and errors on left-out sources."""
    evidence = fit(taken, say=say)
    evidence = fit(taken, likeliest(evidence), say=say)
    scored = leave_out(taken, evidence, "source")
    return replace(evidence, missed=missed(scored))


def left_out_tables(
    cases: Sequence[Case], data: Path, levels: Sequence[str], say: Callable[[str], None]
) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of `leave_out.table` for each level, and those of `own_table` for the level `own-rows`."""
    taken = all_runs(cases, data, say)
    evidence = fit(taken, bundled_evidence().spreads, say)
    return {
        level: list(
            own_table(own_errors(taken, bundled_evidence()))
            if level == "own-rows"
            else table(leave_out(taken, evidence, level))
        )
        for level in levels
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="../shared/data", type=Path)
    parser.add_argument("--write", default=_KEPT, type=Path)
    given = parser.parse_args()
    cases = [case for case in load_cases(FOLDER) if not case.only_named]  # others take too long for few rows
    runs = all_runs(cases, given.data, print)
    evidence = teach(runs, print)
    given.write.write_text(json.dumps(evidence.as_dict()) + "\n", encoding="utf-8")
    errors = own_errors(runs, evidence)
    own = {count: [part.as_dict() for part in own_missed(errors, count)] for count in OWN_ROWS}
    given.write.with_name("own_rows.json").write_text(json.dumps(own) + "\n", encoding="utf-8")
    print(f"spreads {evidence.spreads}")


if __name__ == "__main__":
    main()
