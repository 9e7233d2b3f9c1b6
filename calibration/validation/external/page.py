"""The report of rung 4 as a Markdown page and as plain data.

Cases of many runs are summed up by group, with every row that looks wrong, or comes out far off, listed by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from calibration.validation.external.scoring import Outcome, Row, Verdict
from traces.measured.run import MeasuredRun

MANY = 20  # runs beyond which a case is summed up instead of listed
COMMAND = "tokentwin validate external --write docs/external.md"
_FAR_OFF = 50.0  # percent beyond which a row of a long table is listed

_PREFACE = f"""# Rung 4: runs of engines nobody here wrote

```
{COMMAND}
```
The command simulates public measurements of vLLM on GPUs with the engine's own settings, compares the figures, and
writes this page. You can [add a run](external-cases.md).

- *Blind* predictions come from kernel tables and runs of other sources. No run is predicted with what it taught itself.
- The *90 % interval* is how far off [the other sources](cost-model.md) were. It includes what a client may add, if the
  latencies are a client's; both workloads, if nobody says which of two was sent; and one request, if a rate counts
  requests.
- *Anchored* predictions have two factors, or a factor and a constant, fitted on the one run named with the case. That
  run is left out of every score.
- *Floor* is how far apart repeats of a measurement are, if there are any.
- Errors are (predicted - measured) / measured.
- A case is *validated*, *interpolated* or *extrapolated*, like the weakest part of its step times.
"""


def as_dict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The report, as `--format json` prints it."""
    return {"met": all(verdict.met for o in outcomes for verdict in o.verdicts), "cases": [_case(o) for o in outcomes]}


def _case(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    mark, why = outcome.provenance
    return {
        "name": case.name,
        "title": case.title,
        "source": case.source,
        "engine": case.engine,
        "gpu": case.gpu,
        "standing": mark.name.lower(),
        "why": why,
        "anchor": None if case.anchor is None else case.anchor.run,
        "correction": None if outcome.correction is None else asdict(outcome.correction),
        "targets": [
            {
                **verdict.target.model_dump(mode="json"),
                "error_pct": verdict.error_pct,
                "at": verdict.run,
                "met": verdict.met,
            }
            for verdict in outcome.verdicts
        ],
        "rows": [
            {
                **asdict(row),
                "blind_error_pct": row.error_pct(),
                "anchored_error_pct": row.error_pct("anchored"),
                "covered": row.covered,
            }
            for row in outcome.rows
        ],
        "cautions": {run.name: run.caution for run in outcome.runs if run.caution},
    }


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The page `docs/external.md`."""
    parts = [_PREFACE, "## Targets\n", _table(TARGET_HEADER, map(target_row, _verdicts(outcomes)))]
    parts += _intervals(outcomes)
    for outcome in outcomes:
        parts += list(_section(outcome))
    return "\n".join(parts).rstrip() + "\n"


TARGET_HEADER = ("case", "target", "error", "at", "met")


def _verdicts(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, Verdict]]:
    return ((outcome, verdict) for outcome in outcomes for verdict in outcome.verdicts)


def target_row(pair: tuple[Outcome, Verdict]) -> tuple[str, ...]:
    """One target, as cells under `TARGET_HEADER`."""
    outcome, verdict = pair
    target = verdict.target
    over = "median of " if target.over == "median" else ""
    what = f"{target.column}: {over}{target.figure} within {target.within_pct:g} %"
    return outcome.case.name, what, f"{verdict.error_pct:.1f} %", verdict.run, "met" if verdict.met else "**missed**"


_INTERVAL_HEADER = ("case", "figure", "measured", "in their interval", "", "median width, of the predicted")


def _intervals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How many figures lie in their intervals, and how wide these are."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    if not rows:
        return
    doubtful = {run.name for outcome in outcomes for run in outcome.runs if run.caution}
    calm = [row for row in rows if row.run not in doubtful]
    yield "\n## Intervals\n"
    yield f"{_share(rows)} lie in their 90 % interval; {_share(calm)} of runs that no caution is about.\n"
    yield _table(_INTERVAL_HEADER, (cells for outcome in outcomes for cells in _interval_rows(outcome)))


def _share(rows: Sequence[Row]) -> str:
    covered = sum(row.covered for row in rows)
    return f"{covered} of {len(rows)} figures ({100 * covered / max(len(rows), 1):.0f} %)"


def _interval_rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for figure in dict.fromkeys(row.figure for row in outcome.rows):
        rows = [row for row in outcome.rows if row.figure == figure]
        covered = sum(row.covered for row in rows)
        widths = [100 * (row.high - row.low) / row.blind for row in rows if row.blind]
        width = f"{median(widths):.0f} %" if widths else ""
        share = f"{100 * covered / len(rows):.0f} %"
        yield outcome.case.name, figure, str(len(rows)), str(covered), share, width


def _section(outcome: Outcome) -> Iterator[str]:
    case = outcome.case
    mark, why = outcome.provenance
    yield f"\n## {case.title}\n"
    yield f"{case.source}. {case.engine}, {case.gpu}. Step times are {mark.name.lower()}: {why}.\n"
    covered = sum(row.covered for row in outcome.rows)
    yield f"{covered} of {len(outcome.rows)} figures lie in their 90 % interval.\n"
    if outcome.correction is not None and case.anchor is not None:
        fit = outcome.correction
        yield (
            f"Anchored on *{case.anchor.run}*: decode steps x {fit.decode:.3f}, prompts x {fit.prefill:.3f}, "
            f"{fit.overhead_ms:.1f} ms outside the engine.\n"
        )
    if case.notes:
        yield f"{case.notes}\n"
    if len(outcome.runs) > MANY:
        yield from _summed_up(outcome)
    else:
        yield _table(ROW_HEADER, map(row_cells, outcome.rows))
    cautions = [run for run in outcome.runs if run.caution]
    if cautions and len(outcome.runs) <= MANY:
        yield "\n" + "\n".join(f"- *{run.name}*: {run.caution}." for run in cautions)


ROW_HEADER = ("run", "figure", "measured", "blind", "error", "90 % interval", "anchored", "error", "floor")


def row_cells(row: Row) -> tuple[str, ...]:
    """One figure, as cells under `ROW_HEADER`."""
    return (
        row.run,
        row.figure,
        shown(row.measured),
        shown(row.blind),
        percent(row.error_pct()),
        f"{shown(row.low)} to {shown(row.high)}",
        "" if row.anchored is None else shown(row.anchored),
        percent(row.error_pct("anchored")),
        "" if row.floor_pct is None else f"{row.floor_pct:.1f} %",
    )


def group_header(outcome: Outcome) -> tuple[str, ...]:
    """Header of the medians of a long case."""
    return ("by", "", "runs", *(f"{figure}, median error" for figure in outcome.case.shown))


def group_rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Medians of the absolute error, over all runs and by each group that the runs are in."""
    yield from _group_row(outcome, "all", "", outcome.runs)
    keys = dict.fromkeys(key for run in outcome.runs for key in run.group)
    for key in keys:
        values = sorted(
            {run.group.get(key, "") for run in outcome.runs}, key=lambda v: (len(v) if v.isdigit() else 0, v)
        )
        for value in values:
            yield from _group_row(outcome, key, value, [run for run in outcome.runs if run.group.get(key, "") == value])


def _group_row(outcome: Outcome, key: str, value: str, runs: Sequence[MeasuredRun]) -> Iterator[tuple[str, ...]]:
    medians = (outcome.median_error_pct(figure, [run.name for run in runs]) for figure in outcome.case.shown)
    yield key, value, str(len(runs)), *("" if m is None else f"{m:.1f} %" for m in medians)


def _summed_up(outcome: Outcome) -> Iterator[str]:
    yield "Medians of the absolute error of *blind*:\n"
    yield _table(group_header(outcome), group_rows(outcome))
    calm = [run.name for run in outcome.runs if not run.caution]
    medians = (outcome.median_error_pct(figure, calm) for figure in outcome.case.shown)
    told = ", ".join(f"{f} {m:.1f} %" for f, m in zip(outcome.case.shown, medians, strict=True) if m is not None)
    yield f"\nThe {len(calm)} rows that nothing below speaks against: {told}.\n"
    yield f"### Rows that look wrong, or are more than {_FAR_OFF:g} % off\n\nThey are scored like all others.\n"
    header = ("row", *(f"{figure} {what}" for figure in outcome.case.shown for what in ("measured", "error")), "why")
    yield _table(header, _doubtful(outcome))


def _doubtful(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    by_run: dict[str, dict[str, Row]] = {}
    for row in outcome.rows:
        by_run.setdefault(row.run, {})[row.figure] = row
    for run in outcome.runs:
        rows = by_run.get(run.name, {})
        errors = [abs(row.error_pct() or 0.0) for row in rows.values()]
        if not run.caution and max(errors, default=0.0) <= _FAR_OFF:
            continue
        cells = [
            cell
            for figure in outcome.case.shown
            for cell in (
                (shown(rows[figure].measured), percent(rows[figure].error_pct())) if figure in rows else ("", "")
            )
        ]
        yield run.name, *cells, run.caution or "no reason known"


def shown(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f} %"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
