"""How far off published rows of SGLang are, under an outline of its rules and under its exact policy.

`python -m lab.external.sglang_rows --data DIR` prints a line for all rows of one model that were launched in one way.
Step times are those that other sources taught. Rows with constant states are left out, because both would use the
outline, and so are rows with drafts, and those that may have had one of two deployments, or look wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.external.cases import FOLDER
from lab.external.silicon_table import Rule
from lab.external.teaching import is_new
from tokentwin.calibration.steps.evidence import Evidence, bundled_evidence
from tokentwin.calibration.validation.external.case import Case, load_cases
from tokentwin.calibration.validation.external.predicted_run import FIGURES, PredictedRun, predicted_run
from tokentwin.serving.policies.sglang import is_exact
from tokentwin.traces.measured.run import MeasuredRun

Floats = NDArray[np.float64]

_CASE = "silicon-more"
_OTHERS = tuple(
    Rule(when=when, skip="not a row of SGLang's exact policy")
    for when in ({"backend": "vllm"}, {"backend": "trtllm"}, {"model_path": "Qwen/Qwen3.5-397B-A17B"})
)
HEADER = (
    "| rows | SGLang | launched with | TPOT, outline; exact | TTFT, outline; exact | largest change of TPOT; TTFT |"
)


def launched_with(run: PredictedRun) -> str:
    """Return the settings of SGLang's launcher that the rows of one model differ in."""
    scheduler = run.deployment.scheduler
    mixed = ", `enable_mixed_chunk`" if scheduler.enable_mixed_chunk else ""
    return f"`scheduler_recv_interval` {scheduler.scheduler_recv_interval}{mixed}"


def exact_rows(case: Case, data: Path) -> Iterator[PredictedRun]:
    """Yield the rows that SGLang's exact policy simulates."""
    table = case.format.model_copy(update={"rules": (*case.format.rules, *_OTHERS)})  # type: ignore[attr-defined]
    written: set[tuple[str, ...]] = set()
    for run in table.read(data):
        if run.skipped or run.or_settings or run.caution or not _is_exact(case, run):
            continue
        row = predicted_run(case, run)
        if is_new(row, written):
            yield row


def _is_exact(case: Case, run: MeasuredRun) -> bool:
    deployment, _ = case.deployment_of(run)
    scheduler = deployment.scheduler
    return "sglang" in deployment.policy and scheduler.speculative is None and is_exact(scheduler)


def outlined(run: PredictedRun) -> PredictedRun:
    """Return the row as the outline of SGLang's rules schedules it."""
    return replace(run, deployment=run.deployment.rescheduled(sglang_outline=True), _kept={})


def log_errors(run: PredictedRun, evidence: Evidence) -> Floats:
    """Return the logarithm of predicted over measured of both `FIGURES`, without the evidence of the row's source."""
    others = evidence.without(lambda origin: origin.source == run.origin.source)
    predicted, _ = run.predicted(others.belief(run.origin).logs)
    return np.asarray(np.log(predicted / run.measured))


def table_row(name: Sequence[str], errors: Sequence[tuple[Floats, Floats]]) -> str:
    """Return a line of the table: medians of absolute errors in percent; `errors` are of the outline and exact."""
    outline, exact = (np.array(part) for part in zip(*errors, strict=True))
    before, after = (np.median(np.abs(np.expm1(part)), axis=0) * 100 for part in (outline, exact))
    change = np.abs(np.expm1(exact - outline)).max(axis=0) * 100
    columns = (f"{before[at]:.1f}; {after[at]:.1f}" for at in range(len(FIGURES)))
    return f"| {' | '.join((*name, *columns))} | {change[0]:.1f}; {change[1]:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="../shared/data", type=Path)
    given = parser.parse_args()
    case = next(case for case in load_cases(FOLDER) if case.name == _CASE)
    evidence = bundled_evidence()
    groups: dict[tuple[str, str, str], list[tuple[Floats, Floats]]] = {}
    for run in exact_rows(case, given.data):
        kind = f"{run.deployment.model}, {run.gpu}", run.measured_run.engine, launched_with(run)
        groups.setdefault(kind, []).append((log_errors(outlined(run), evidence), log_errors(run, evidence)))
    print(f"{HEADER}\n{'|-' * HEADER.count(' | ')}|-|")
    for (rows, engine, launch), errors in sorted(groups.items()):
        print(table_row((f"{rows} ({len(errors)})", engine, launch), errors), flush=True)
    every = [pair for errors in groups.values() for pair in errors]
    print(table_row((f"all ({len(every)})", "", ""), every))


if __name__ == "__main__":
    main()
