"""The results of a validation report and of published engines, on the page and in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from numpy.typing import NDArray

from tokentwin.calibration.trust import MEASURED, UNKNOWN, Trust
from tokentwin.calibration.validation.evidence import trust_in_report, trust_in_steps
from tokentwin.calibration.validation.report import ValidationReport, load_residuals, resolve
from tokentwin.dashboard.sheet import Sheet
from tokentwin.dashboard.shown import when
from tokentwin.dashboard.trust_page import charts as trust_charts
from tokentwin.dashboard.trust_page.external_charts import errors_by_source
from tokentwin.dashboard.trust_page.results import Column, External, source_row, trust
from tokentwin.dashboard.trust_page.words import (
    AT_KNOWN_SPEED,
    ERRORS_AT_KNOWN_SPEED,
    bias,
    blind_title,
)
from tokentwin.serving.answers.figures import shown_change, shown_percent
from tokentwin.serving.answers.report import FIGURE, METRIC, PERCENT, Table
from tokentwin.serving.answers.report import Column as TableColumn
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics

_REQUESTS = "Real and simulated latency of all requests"
_STEPS = "Step time, predicted against measured"
_ERRORS = (
    "A bar is the error of the simulation. The orange band is the noise floor: the difference between repeated real "
    "runs of the same requests. No prediction can be more accurate than the noise."
)
_HELP_STEPS = (
    "Held-out steps are measured steps that were not used to fit the calibration. A decode step computes one token of "
    "each running request, a prefill step computes prompts, and a mixed step does both."
)
_PUBLISHED = (
    "Public measurements of engines, simulated with the same settings. *Blind* predictions use only measured kernel "
    "times and runs of other sources. *Anchored* predictions also fit one or two factors to one run of the source; "
    "this run is left out. A dot is the error of one figure; a triangle at the edge is an error beyond the axis."
)


COMPARED = ("ttft_ms", "tpot_ms", "e2e_ms")
Latencies = Mapping[str, NDArray[Any]]  # values of all requests


class ComparedLatencies(NamedTuple):
    """Latencies of the real runs and the simulated run, as far as they could be read, and errors of the other runs."""

    real: list[Latencies]
    simulated: Latencies | None
    problems: list[str]
    trust: Trust


def compared_latencies(
    directory: Path, report: ValidationReport, read: Callable[[Path], RunMetrics]
) -> ComparedLatencies:
    """Return the latencies of the report in `directory`; `read` opens a recording."""
    latencies: dict[str, Latencies] = {}
    problems = []
    names = report.recordings
    for name in filter(None, (*names.real, names.simulated)):
        try:
            metrics = read(resolve(directory, name))
            latencies[name] = {latency: metrics.values(latency) for latency in COMPARED}
        except UserError as error:
            problems.append(str(error))
    real = [latencies[name] for name in names.real if name in latencies]
    simulated = latencies.get(names.simulated or "")
    trust = trust_in_report(report)
    if simulated is None:
        trust = Trust(MEASURED, "recorded on the real engine; the report has no simulated run to compare")
    elif not real:
        trust = Trust(UNKNOWN, "the report has no real run to compare with the simulated run")
    return ComparedLatencies(real, simulated, problems, trust)


def figures(
    latencies: ComparedLatencies, report: ValidationReport, bounds: Sequence[tuple[str, float]] = ()
) -> dict[str, go.Figure]:
    """Return the figures of whole runs: latencies, blind errors and, if known, errors with the machine's slowdown.

    The latencies have lines at `bounds` (metric, ms).
    """
    drawn = {"errors": trust_charts.errors(report.rows)}
    if latencies.real or latencies.simulated:
        drawn["cdfs"] = trust_charts.cdfs(latencies.real, latencies.simulated, COMPARED, bounds)
    if report.known_speed_rows:
        drawn["errors-at-known-speed"] = trust_charts.errors(report.known_speed_rows)
    return drawn


def show_runs(
    to: Sheet, latencies: ComparedLatencies, report: ValidationReport, drawn: Mapping[str, go.Figure]
) -> None:
    """Show whole runs, real and simulated."""
    for problem in latencies.problems:
        to.warning(problem)
    if "cdfs" in drawn:
        help = "\n\n".join(metric(name).help for name in COMPARED)
        to.figure(drawn["cdfs"], "cdfs", _REQUESTS, latencies.trust, help)
    else:
        to.heading(_REQUESTS, None)
        to.text("" if latencies.problems else "The report has no recordings.", soft=True)
    rated = trust_in_report(report)
    to.figure(drawn["errors"], "errors", blind_title(report), rated, _ERRORS)
    if "errors-at-known-speed" in drawn:
        to.figure(drawn["errors-at-known-speed"], "errors-at-known-speed", AT_KNOWN_SPEED, rated, ERRORS_AT_KNOWN_SPEED)
    if report.rows:
        with to.fold("The figures"):
            to.table(report.figures())


def show_engines(to: Sheet, by_engine: Mapping[str, ValidationReport]) -> None:
    """Show the blind error of each statistic on each engine, beside its noise."""
    by_figure: dict[tuple[str, str], dict[str, str]] = {}
    for engine, report in by_engine.items():
        for row in report.rows:
            if row.error_pct is not None:
                noise = "" if row.floor_pct is None else f" (noise {shown_percent(abs(row.floor_pct), 1)})"
                said = f"{shown_change(row.error_pct, 1)}{noise}"
                by_figure.setdefault((row.metric, row.stat), {})[engine] = said
    names = [f"{name} (disturbed)" if report.disturbed else name for name, report in by_engine.items()]
    columns = [TableColumn("metric", METRIC), TableColumn("stat"), *(TableColumn(name, FIGURE) for name in names)]
    to.heading("The error on each engine", None, _ENGINES)
    to.table(Table(columns, [(*key, *(said.get(name, "") for name in by_engine)) for key, said in by_figure.items()]))


_ENGINES = (
    "The error of the blind simulation of a real run on each engine, with the calibration of this engine. The noise is "
    "the largest difference between repeats of the real run. Workloads may differ between reports. If other programs "
    "used the machine during the real run, the column says disturbed."
)


def show_steps(to: Sheet, directory: Path, report: ValidationReport) -> None:
    """Show the held-out steps of the report in `directory`. Raises UserError if they are damaged."""
    if (table := load_residuals(directory)) is None:
        to.heading(_STEPS, None)
        to.text("The report has no errors of single steps.", soft=True)
        return
    columns = (table[name].to_numpy(zero_copy_only=False) for name in ("regime", "measured_ns", "predicted_ns"))
    medians = (regime.median_error_pct for regime in report.rungs.step.regimes.values()) if report.rungs.step else ()
    rated = trust_in_steps(table.num_rows, medians, "and not used to fit the calibration")
    to.figure(trust_charts.residuals(*columns), "residuals", _STEPS, rated, _HELP_STEPS)
    to.text(bias(report), soft=True)


def show_published(to: Sheet, external: External, column: Column) -> None:
    """Show errors by source over their targets, then a row for each source."""
    shown = [case for case in external.cases if any(row.error_pct(column) is not None for row in case.rows)]
    plot = errors_by_source(shown, column)
    to.figure(plot, "external", "Errors for published runs of other engines", trust(shown), _PUBLISHED)
    forms = dict.fromkeys(("TTFT", "TPOT", "E2E", "in 90 % band"), PERCENT)
    to.table(Table.from_rows([source_row(case, column) for case in external.cases], forms))
    to.text(
        f"The columns TTFT, TPOT and E2E are median absolute errors of {column} predictions. The results come from "
        f"`tokentwin validate external`, {when(external.created) or 'undated'}.",
        soft=True,
    )
