"""The report of scored cases as plain data and as cells of tables; long cases are summarised by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tokentwin.calibration.trust import LEVELS
from tokentwin.calibration.validation.external.scoring import CaseResult, Row, Verdict
from tokentwin.calibration.validation.external.served import Served, served
from tokentwin.serving.answers.figures import shown_band, shown_change, shown_number, shown_percent, shown_share
from tokentwin.serving.workload import Workload
from tokentwin.traces.measured.run import MeasuredRun

MANY = 20  # number of runs above which a case is summarised instead of listed
FEW = 5  # minimum number of runs of a group with a median of its own


def as_dict(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Return the report in the form that `--format json` prints."""
    return {"met": all(verdict.met for o in results for verdict in o.verdicts), "cases": [_case(o) for o in results]}


def _case(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "name": case.name,
        "title": case.title,
        "source": case.source,
        "engine": case.engine,
        "gpu": case.gpu,
        "trust": result.trust.level,
        "why": result.trust.reason,
        "anchor": None if case.anchor is None else case.anchor.run,
        "correction": None if result.correction is None else asdict(result.correction),
        "targets": [
            {
                **verdict.target.model_dump(mode="json"),
                "error_pct": verdict.error_pct,
                "at": verdict.run,
                "met": verdict.met,
            }
            for verdict in result.verdicts
        ],
        "rows": [
            {
                **asdict(row),
                "blind_error_pct": row.error_pct(),
                "anchored_error_pct": row.error_pct("anchored"),
                "covered": row.covered,
            }
            for row in result.rows
        ],
        "served": {name: asdict(one) for name, one in _served(result).items()},
        "cautions": {run.name: run.caution for run in result.runs if run.caution},
    }


def _served(result: CaseResult) -> dict[str, Served]:
    """Return what each run served by its name; all rows of a log of steps are one run."""
    if result.case.is_of_steps:
        one = served(result.case, MeasuredRun(result.case.name, Workload([]), {}))
        return dict.fromkeys((row.run for row in result.rows), one)
    return {run.name: served(result.case, run) for run in result.runs}


TARGET_HEADER = ("case", "target", "error", "at", "met")


def target_row(pair: tuple[CaseResult, Verdict]) -> tuple[str, ...]:
    """Return one target as cells under `TARGET_HEADER`."""
    result, verdict = pair
    target = verdict.target
    over = "median of " if target.over == "median" else ""
    what = f"{target.column}: {over}{target.figure} within {target.within_pct:g} %"
    return result.case.name, what, shown_percent(verdict.error_pct), verdict.run, "met" if verdict.met else "**missed**"


LEVEL_HEADER = ("trust", "figures", "median error", "in their interval")


def level_rows(results: Sequence[CaseResult]) -> Iterator[tuple[str, ...]]:
    """Yield errors of the latencies of all runs by trust level, as cells under `LEVEL_HEADER`."""
    for level in LEVELS:
        rows = [row for o in results for row in o.rows if "_ms" in row.figure and o.levels[row.run] == level]
        if rows:
            errors = [abs(row.error_pct() or 0.0) for row in rows]
            covered = sum(row.covered for row in rows) / len(rows)
            yield level, str(len(rows)), shown_percent(median(errors)), shown_share(covered)


ROW_HEADER = ("run", "figure", "measured", "blind", "error", "90 % interval", "anchored", "error", "floor")


def row_cells(row: Row) -> tuple[str, ...]:
    """Return one figure as cells under `ROW_HEADER`."""
    return (
        row.run,
        row.figure,
        shown_number(row.measured),
        shown_number(row.blind),
        shown_change(row.error_pct()),
        shown_band(row.low, row.high),
        shown_number(row.anchored),
        shown_change(row.error_pct("anchored")),
        shown_percent(row.floor_pct),
    )


def group_header(result: CaseResult) -> tuple[str, ...]:
    """Return the header of the medians of a long case."""
    return ("by", "", "runs", *(f"{figure}, median error, %" for figure in result.case.shown))


def group_rows(result: CaseResult) -> Iterator[tuple[str, ...]]:
    """Yield medians of the absolute error over all runs, and over each group with enough runs."""
    groups: dict[tuple[str, str], list[str]] = {("all", ""): [run.name for run in result.runs]}
    for key in dict.fromkeys(key for run in result.runs for key in run.group):
        for value in sorted({run.group.get(key, "") for run in result.runs}, key=lambda v: (v.isdigit() * len(v), v)):
            groups[key, value] = [run.name for run in result.runs if run.group.get(key, "") == value]
    for (key, value), runs in groups.items():
        if len(runs) >= FEW and (key == "all" or len(runs) < len(result.runs)):
            medians = (result.median_error_pct(figure, runs) for figure in result.case.shown)
            yield key, value, str(len(runs)), *("" if m is None else f"{m:.1f}" for m in medians)
