"""The report of rung 4 as a Markdown page and as plain data.

Cases of many runs are summed up by group, and what looks wrong in them is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from math import inf
from statistics import median
from typing import Any

from calibration.validation.external.leave_out import HEADER as LEFT_OUT_HEADER
from calibration.validation.external.scoring import CaseResult, Row, Verdict

MANY = 20  # runs beyond which a case is summed up instead of listed
_FEW = 5  # runs of a group, below which it has no median of its own
COMMAND = "tokentwin validate external --write docs/external.md"

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
- Errors are (predicted - measured) / measured. Tables of runs have what was measured and, in percent, the error of
  *blind*, in bold if the measured figure is outside its interval, and that of *anchored*, if there is one.
- A case is *validated*, *interpolated* or *extrapolated*, like the weakest part of its step times.
"""


_LACKING = """
- B300 within 6 % at TP2, TP4 and TP8: measured were a mixture at TP2 with expert parallelism and Qwen3-32B at TP4, and
  nothing at TP8. Why the mixture is further off is not known; no table has its linear attention.
- RTX PRO 6000 at TP2 over PCIe, E2E within 10 %: there is no such run; the one above had a single GPU.
- Prefill and decode apart (cases that run if named): TPOT is off by 5 (SGLang) and 29 % (TensorRT-LLM) with
  [published workers](fleet.md#prefill-and-decode-apart), by 54 % with searched ones, whose TTFT is off by 40."""


def as_dict(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The report, as `--format json` prints it."""
    return {"met": all(verdict.met for o in results for verdict in o.verdicts), "cases": [_case(o) for o in results]}


def _case(result: CaseResult) -> dict[str, Any]:
    case = result.case
    coverage, why = result.provenance
    return {
        "name": case.name,
        "title": case.title,
        "source": case.source,
        "engine": case.engine,
        "gpu": case.gpu,
        "standing": coverage.name.lower(),
        "why": why,
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
        "cautions": {run.name: run.caution for run in result.runs if run.caution},
    }


def markdown(results: Sequence[CaseResult]) -> str:
    """The page `docs/external.md`."""
    parts = [_PREFACE, "## Targets\n", markdown_table(TARGET_HEADER, map(target_row, _verdicts(results))), _LACKING]
    parts += ["\n## By how far predictions are told to be trusted\n", markdown_table(MARK_HEADER, mark_rows(results))]
    parts += _intervals(results)
    for result in results:
        parts += list(_section(result))
    return "\n".join(parts).rstrip() + "\n"


LeftOut = Mapping[str, Sequence[Sequence[str]]]
"""Of each level, rows of the table of what was left out (`leave_out.table`)."""

_LEFT_OUT = "\n## How far off groups are that taught nothing\n"


def left_out_section(tables: LeftOut) -> str:
    """The last section of that page, which another command writes."""
    parts = [
        _LEFT_OUT,
        "Every row is predicted by what the other groups taught; its band is as wide as rows of other groups needed.",
        "*Off* is the median error. Targets: TPOT 8 % and TTFT 20 % off, for vLLM alone 7 and 15 %, and 85 to 95 % of",
        "the rows of a GPU under an engine in the band. What misses is bold;",
        "[why](cost-model.md#what-other-engines-teach), as far as it is known. To write this section:",
        "`tokentwin validate external --leave-out gpu --leave-out engine ... --write docs/external.md`.",
    ]
    for level, rows in tables.items():
        parts += [f"\n### By {level}\n", markdown_table(LEFT_OUT_HEADER, map(_against_targets, rows))]
    return "\n".join(parts) + "\n"


_MEDIANS_PCT = {"all": (8.0, 20.0), "vLLM": (7.0, 15.0)}  # of TPOT and TTFT
_IN_BAND_PCT = (85.0, 95.0)


def _against_targets(row: Sequence[str]) -> tuple[str, ...]:
    """A row of `leave_out.table`, with what misses its target in bold."""
    name, count, *cells = row
    low, high = _IN_BAND_PCT if name.startswith("of these") else (0.0, 100.0)
    bounds = [*((0.0, most) for most in _MEDIANS_PCT.get(name, (inf, inf))), (low, high), (low, high)]
    held = (not cell or least <= float(cell) <= most for cell, (least, most) in zip(cells, bounds, strict=True))
    return name, count, *(cell if ok else f"**{cell}**" for cell, ok in zip(cells, held, strict=True))


def with_section(page: str, section: str) -> str:
    """A page with another last section."""
    return page.partition(_LEFT_OUT)[0] + section


def section_of(page: str) -> str:
    """That section of a page; empty where it has none."""
    return "".join(page.partition(_LEFT_OUT)[1:])


TARGET_HEADER = ("case", "target", "error", "at", "met")


def _verdicts(results: Sequence[CaseResult]) -> Iterator[tuple[CaseResult, Verdict]]:
    return ((result, verdict) for result in results for verdict in result.verdicts)


def target_row(pair: tuple[CaseResult, Verdict]) -> tuple[str, ...]:
    """One target, as cells under `TARGET_HEADER`."""
    result, verdict = pair
    target = verdict.target
    over = "median of " if target.over == "median" else ""
    what = f"{target.column}: {over}{target.figure} within {target.within_pct:g} %"
    return result.case.name, what, f"{verdict.error_pct:.1f} %", verdict.run, "met" if verdict.met else "**missed**"


MARK_HEADER = ("marked", "figures", "median error", "in their interval")


def mark_rows(results: Sequence[CaseResult]) -> Iterator[tuple[str, ...]]:
    """Of the latencies of all runs, by their mark: cells under `MARK_HEADER`."""
    marked = [(result.marks[row.run], row) for result in results for row in result.rows if "_ms" in row.figure]
    for mark in sorted({mark for mark, _ in marked}):
        rows = [row for found, row in marked if found == mark]
        errors = [abs(row.error_pct() or 0.0) for row in rows]
        covered = 100 * sum(row.covered for row in rows) / len(rows)
        yield mark.name.lower(), str(len(rows)), f"{median(errors):.1f} %", f"{covered:.0f} %"


def _intervals(results: Sequence[CaseResult]) -> Iterator[str]:
    """How many figures lie in their intervals."""
    rows = [row for result in results for row in result.rows]
    if not rows:
        return
    doubtful = {run.name for result in results for run in result.runs if run.caution}
    calm = [row for row in rows if row.run not in doubtful]
    yield "\n## Intervals\n"
    yield f"{_share(rows)} lie in their 90 % interval; {_share(calm)} of runs that no caution is about."


def _share(rows: Sequence[Row]) -> str:
    covered = sum(row.covered for row in rows)
    return f"{covered} of {len(rows)} figures ({100 * covered / max(len(rows), 1):.0f} %)"


def _section(result: CaseResult) -> Iterator[str]:
    case = result.case
    coverage, why = result.provenance
    yield f"\n## {case.title}\n"
    yield f"{case.source}. {case.engine}, {case.gpu}. Step times are {coverage.name.lower()}: {why}.\n"
    if result.correction is not None and case.anchor is not None:
        fit = result.correction
        yield (
            f"Anchored on *{case.anchor.run}*: decode steps x {fit.decode:.3f}, prompts x {fit.prefill:.3f}, "
            f"{fit.overhead_ms:.1f} ms outside the engine.\n"
        )
    if case.notes:
        yield f"{case.notes}\n"
    if len(result.runs) > MANY:
        yield from _summed_up(result)
    else:
        yield from _by_run(result)
        if cautions := [f"- *{run.name}*: {run.caution}." for run in result.runs if run.caution]:
            yield "\n" + "\n".join(cautions)


def _by_run(result: CaseResult) -> Iterator[str]:
    """A line for each run, with a cell for each figure that any of them has."""
    found: dict[str, dict[str, str]] = {}
    for row in result.rows:
        told = (percent(row.error_pct(column)).removesuffix(" %") for column in ("blind", "anchored"))
        blind, *anchored = filter(None, told)
        cell = (shown(row.measured), blind if row.covered else f"**{blind}**", *anchored)
        found.setdefault(row.run, {})[row.figure] = ", ".join(cell)
    figures = list(dict.fromkeys(row.figure for row in result.rows))
    yield markdown_table(("run", *figures), ([run, *map(of.get, figures, repeat(""))] for run, of in found.items()))


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


def group_header(result: CaseResult) -> tuple[str, ...]:
    """Header of the medians of a long case."""
    return ("by", "", "runs", *(f"{figure}, median error, %" for figure in result.case.shown))


def group_rows(result: CaseResult) -> Iterator[tuple[str, ...]]:
    """Medians of the absolute error, over all runs and by each group of several that the runs are in."""
    groups: dict[tuple[str, str], list[str]] = {("all", ""): [run.name for run in result.runs]}
    for key in dict.fromkeys(key for run in result.runs for key in run.group):
        for value in sorted({run.group.get(key, "") for run in result.runs}, key=lambda v: (v.isdigit() * len(v), v)):
            groups[key, value] = [run.name for run in result.runs if run.group.get(key, "") == value]
    for (key, value), runs in groups.items():
        if len(runs) >= _FEW and (key == "all" or len(runs) < len(result.runs)):
            medians = (result.median_error_pct(figure, runs) for figure in result.case.shown)
            yield key, value, str(len(runs)), *("" if m is None else f"{m:.1f}" for m in medians)


def _summed_up(result: CaseResult) -> Iterator[str]:
    yield f"Of *blind*, in groups of {_FEW} runs or more:\n"
    yield markdown_table(group_header(result), group_rows(result))
    calm = [run.name for run in result.runs if not run.caution]
    medians = (result.median_error_pct(figure, calm) for figure in result.case.shown)
    errors = ", ".join(f"{f} {m:.1f} %" for f, m in zip(result.case.shown, medians, strict=True) if m is not None)
    yield f"\nThe {len(calm)} rows that nothing below speaks against: {errors}.\n"
    cautions = (re.sub(r"at concurrency \d+ \(.*\)", "at another concurrency", run.caution) for run in result.runs)
    doubts = Counter(why for caution in cautions for why in caution.split("; ") if why)
    if doubts:
        yield "Rows that look wrong are scored like all others:\n"
        yield from (f"- {count}: {why}" for why, count in doubts.most_common())


def shown(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f} %"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
