"""The report of validation's rung 4 (docs/calibration.md), on runs of other engines, as a Markdown page.

Cases of many runs are summed up by group, and doubts about their rows are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from math import inf
from statistics import median

from lab.external.leave_out import HEADER as LEFT_OUT_HEADER
from lab.external.own_rows import own_rows_name
from tokentwin.calibration.validation.external.report import (
    FEW,
    LEVEL_HEADER,
    MANY,
    TARGET_HEADER,
    group_header,
    group_rows,
    level_rows,
    target_row,
)
from tokentwin.calibration.validation.external.scoring import CaseResult, Row, Verdict
from tokentwin.serving.answers.figures import shown_change, shown_number, shown_percent, shown_share
from tokentwin.serving.answers.markdown import markdown_table

COMMAND = "tokentwin validate external --write lab/results/external.md"

_PREFACE = f"""# Rung 4: runs of engines nobody here wrote

```
{COMMAND}
```
The command simulates public measurements of vLLM on GPUs with the engine's own settings, compares the figures, and
writes this page. You can [add a run](../../docs/external-cases.md).

- *Blind* predictions come from kernel tables and runs of other sources. No run is predicted with what it taught itself.
- The *90 % interval* is how far off [the other sources](../../docs/cost-model.md) were. It includes what a client may
  add, if the latencies are a client's; both workloads, if nobody says which of two was sent; and one request, if a
  rate counts requests.
- *Anchored* predictions have two factors, or a factor and a constant, fitted on the one run named with the case. That
  run is left out of every score.
- Errors are (predicted - measured) / measured. Tables of runs have what was measured and, in percent, the error of
  *blind*, in bold if the measured figure is outside its interval, and that of *anchored*, if there is one.
- A case is *validated*, *interpolated* or *extrapolated*, like the weakest part of its step times.
"""


_LACKING = """
- B300 within 6 % at TP2, TP4 and TP8: measured were a mixture at TP2 with expert parallelism and Qwen3-32B at TP4, and
  nothing at TP8, where a review measured an error of 6.3 % in decode steps. Why the mixture is further off is not
  known; no table has its linear attention.
- A review scored earlier predictions for 1,453 rows that are kept apart, so nobody can repeat it here. TPOT was off by
  9.1 % and TTFT by 20.5 % (for vLLM by 6.7 and 12.3 %), and 89 % of the figures were in their interval. Of the
  *interpolated* figures, 86 % (TPOT) and 85 % (TTFT) were, fewer than in the table below.
- RTX PRO 6000 at TP2 over PCIe, E2E within 10 %: there is no such run; the one above had a single GPU.
- Prefill and decode apart (cases that run if named): with [published
  configurations](steps.md#prefill-and-decode-apart) TPOT is off by 12 % and TTFT by 48 % in ten rows with one
  possible configuration. Earlier predictions with searched workers were off by 54 and 40 %."""


def markdown(results: Sequence[CaseResult]) -> str:
    """Return the page `lab/results/external.md`."""
    parts = [_PREFACE, "## Targets\n", markdown_table(TARGET_HEADER, map(target_row, _verdicts(results))), _LACKING]
    parts += ["\n## By how far predictions are said to be trusted\n", markdown_table(LEVEL_HEADER, level_rows(results))]
    parts += _intervals(results)
    for result in results:
        parts += list(_section(result))
    return "\n".join(parts).rstrip() + "\n"


LeftOut = Mapping[str, Sequence[Sequence[str]]]
"""Of each level, rows of the table of what was left out (`leave_out.table`)."""

_LEFT_OUT = "\n## How far off groups are that taught nothing\n"


def left_out_section(tables: LeftOut) -> str:
    """Return the last section of that page, on left-out groups, which another command writes."""
    parts = [
        _LEFT_OUT,
        "Every row is predicted by what the other groups taught; its band is as wide as rows of other groups needed.",
        "*Off* is the median error. Targets: TPOT 7 % and TTFT 16 % off (vLLM alone: 7 and 15 %), and 85 to 95 % of",
        "the rows of a GPU under an engine in the band. What misses is bold;",
        "[why](../../docs/cost-model.md#what-other-engines-teach), as far as it is known. To write this section:",
        "`tokentwin validate external --leave-out gpu --leave-out engine ... --write lab/results/external.md`.",
    ]
    for level, rows in tables.items():
        explained = [_OWN_ROWS] if level == "own-rows" else []
        parts += [
            f"\n### {LEFT_OUT_TITLES[level]}\n",
            *explained,
            markdown_table(LEFT_OUT_HEADER, map(_against_targets, rows)),
        ]
    return "\n".join(parts) + "\n"


_OWN_ROWS = """\
Some rows of a deployment (one model, GPU, engine, precision and parallel layout), drawn at random, join the
evidence of the other sources, and predict its other rows. *Rows* counts the predictions of all draws.
"""
LEFT_OUT_TITLES = {
    "gpu": "By gpu",
    "engine": "By engine",
    "model": "By model",
    "source": "By source",
    "own-rows": "With a few rows of one's own deployment",
}
_MEDIANS_PCT = {  # maximum median errors of TPOT and TTFT
    "all": (7.0, 16.0),
    "vLLM": (7.0, 15.0),
    own_rows_name(3): (4.5, 12.0),
}
_IN_BAND_PCT = (85.0, 95.0)


def _against_targets(row: Sequence[str]) -> tuple[str, ...]:
    """Return a row of `leave_out.table`, with cells that miss their target in bold."""
    name, count, *cells = row
    low, high = _IN_BAND_PCT if name.startswith(("of these", "own rows")) else (0.0, 100.0)
    bounds = [*((0.0, most) for most in _MEDIANS_PCT.get(name, (inf, inf))), (low, high), (low, high)]
    within = (not cell or least <= float(cell) <= most for cell, (least, most) in zip(cells, bounds, strict=True))
    return name, count, *(cell if ok else f"**{cell}**" for cell, ok in zip(cells, within, strict=True))


def with_section(page: str, section: str) -> str:
    """Return the page with its last section replaced by `section`."""
    return page.partition(_LEFT_OUT)[0] + section


def section_of(page: str) -> str:
    """Return the last section of a page; empty if it has none."""
    return "".join(page.partition(_LEFT_OUT)[1:])


def _verdicts(results: Sequence[CaseResult]) -> Iterator[tuple[CaseResult, Verdict]]:
    return ((result, verdict) for result in results for verdict in result.verdicts)


def _intervals(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the section that says how many figures lie in their intervals."""
    rows = [row for result in results for row in result.rows]
    if not rows:
        return
    doubtful = {run.name for result in results for run in result.runs if run.caution}
    calm = [row for row in rows if row.run not in doubtful]
    yield "\n## Intervals\n"
    yield f"{_share(rows)} lie in their 90 % interval; {_share(calm)} of runs that no caution is about."


def _share(rows: Sequence[Row]) -> str:
    covered = sum(row.covered for row in rows)
    return f"{covered} of {len(rows)} figures ({shown_share(covered / max(len(rows), 1))})"


def _section(result: CaseResult) -> Iterator[str]:
    case = result.case
    yield f"\n## {case.title}\n"
    yield f"{case.source}. {case.engine}, {case.gpu}. Step times are {result.trust.level}: {result.trust.reason}.\n"
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
    """Yield a table with a row for each run and a column for each figure that any run has."""
    rows: dict[str, dict[str, str]] = {}
    for row in result.rows:
        errors = (row.error_pct(column) for column in ("blind", "anchored"))
        blind, *anchored = (shown_change(error, unit="") for error in errors if error is not None)
        cell = (shown_number(row.measured), blind if row.covered else f"**{blind}**", *anchored)
        rows.setdefault(row.run, {})[row.figure] = ", ".join(cell)
    figures = list(dict.fromkeys(row.figure for row in result.rows))
    yield markdown_table(
        ("run", *figures), ([run, *map(cells.get, figures, repeat(""))] for run, cells in rows.items())
    )


def _hypotheses(result: CaseResult) -> Iterator[str]:
    """Yield errors of the first and of the nearest hypothesis, for rows whose deployment is stated only in part."""
    for figure in result.case.shown:
        pairs = [
            [abs(row.error_pct(column) or 0.0) for column in ("blind", "nearest")]
            for row in result.rows
            if row.figure == figure and row.others
        ]
        if pairs:
            first, nearest = (median(errors) for errors in zip(*pairs, strict=True))
            yield (
                f"\n{len(pairs)} rows may have had one of several deployments; their intervals cover all. Median error "
                f"of {figure} with the first {first:.0f} %, with the nearest {nearest:.0f} %.\n"
            )


def _summed_up(result: CaseResult) -> Iterator[str]:
    yield f"Of *blind*, in groups of {FEW} runs or more:\n"
    yield markdown_table(group_header(result), group_rows(result))
    yield from _hypotheses(result)
    calm = [run.name for run in result.runs if not run.caution]
    medians = (result.median_error_pct(figure, calm) for figure in result.case.shown)
    errors = ", ".join(
        f"{f} {shown_percent(m)}" for f, m in zip(result.case.shown, medians, strict=True) if m is not None
    )
    yield f"\nThe {len(calm)} rows that nothing below speaks against: {errors}.\n"
    cautions = (re.sub(r"at concurrency \d+ \(.*\)", "at another concurrency", run.caution) for run in result.runs)
    doubts = Counter(why for caution in cautions for why in caution.split("; ") if why)
    if doubts:
        yield "Rows that look wrong are scored like all others:\n"
        yield from (f"- {count}: {why}" for why, count in doubts.most_common())
