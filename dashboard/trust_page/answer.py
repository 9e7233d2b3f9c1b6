"""What a validation report and published engines say, on the page and in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import plotly.graph_objects as go

from calibration.validation.report import ValidationReport
from dashboard.sheet import Sheet
from dashboard.shown import when
from dashboard.trust_page import charts as trust_charts
from dashboard.trust_page.external_charts import errors_by_source
from dashboard.trust_page.external_results import Column, External, provenance, source_row
from dashboard.trust_page.latencies import COMPARED, ComparedLatencies, step_errors
from dashboard.trust_page.words import ERRORS_IN_WEATHER, IN_WEATHER, bias, blind_title, figure_rows, of_report
from serving.metrics import metric

_REQUESTS = "Real and simulated latency of all requests"
_STEPS = "Step time, predicted against measured"
_ERRORS = (
    "A bar is the error of the simulation. The orange band is the noise floor: how far repeats of the same real run "
    "lie from each other. No prediction can be better than that."
)
_HELP_STEPS = (
    "The calibration did not see these held-out steps. A decode step advances running requests by one token each, a "
    "prefill step computes prompts, a mixed step does both."
)
_PUBLISHED = (
    "Public measurements of vLLM, simulated with the engine's own settings. *Blind* predictions use kernel tables and "
    "runs of other sources only. *Anchored* predictions fit a factor or two on one run of the source, which the score "
    "leaves out. A dot is the error of one figure; a triangle at the edge is farther off."
)


def figures(found: ComparedLatencies, report: ValidationReport) -> dict[str, go.Figure]:
    """Of whole runs: the latencies, and the errors blind and, where they are known, in the same weather."""
    drawn = {"errors": trust_charts.errors(report.rows)}
    if found.real or found.simulated:
        drawn["cdfs"] = trust_charts.cdfs(found.real, found.simulated, COMPARED)
    if report.weather_rows:
        drawn["errors-in-weather"] = trust_charts.errors(report.weather_rows)
    return drawn


def show_runs(to: Sheet, found: ComparedLatencies, report: ValidationReport, drawn: Mapping[str, go.Figure]) -> None:
    """Whole runs, real and simulated."""
    for problem in found.problems:
        to.warning(problem)
    if "cdfs" in drawn:
        help = "\n\n".join(metric(name).help for name in COMPARED)
        to.figure(drawn["cdfs"], "cdfs", _REQUESTS, found.provenance, help)
    else:
        to.heading(_REQUESTS, None)
        to.text("" if found.problems else "The report names no recording.", soft=True)
    rated = of_report(report)
    to.figure(drawn["errors"], "errors", blind_title(report), rated, _ERRORS)
    if "errors-in-weather" in drawn:
        to.figure(drawn["errors-in-weather"], "errors-in-weather", IN_WEATHER, rated, ERRORS_IN_WEATHER)
    if report.rows:
        with to.fold("The figures"):
            formats = dict.fromkeys(("real", "simulated", "in the same weather"), "%.2f")
            formats |= dict.fromkeys(("error (%)", "its error (%)"), "%+.1f")
            to.table(figure_rows(report), formats | dict.fromkeys(("floor (%)", "its floor (%)"), "%.1f"))


def show_steps(to: Sheet, directory: Path, report: ValidationReport) -> None:
    """Held-out steps of the report in `directory`. Raises UserError where they are damaged."""
    if (found := step_errors(directory, report)) is None:
        to.heading(_STEPS, None)
        to.text("The report holds no step residuals.", soft=True)
        return
    plot, rated = found
    to.figure(plot, "residuals", _STEPS, rated, _HELP_STEPS)
    to.text(bias(report), soft=True)


def show_published(to: Sheet, external: External, column: Column) -> None:
    """Errors by source over their targets, then a row for each source."""
    shown = [case for case in external.cases if any(row.error_pct(column) is not None for row in case.rows)]
    plot = errors_by_source(shown, column)
    to.figure(plot, "external", "Published engines, predicted", provenance(shown), _PUBLISHED)
    formats = dict.fromkeys(("TTFT", "TPOT", "E2E", "in 90 % band"), "%.1f %%")
    to.table([source_row(case, column) for case in external.cases], formats)
    to.text(
        f"TTFT, TPOT and E2E are median absolute errors of {column} predictions. Made by `tokentwin validate "
        f"external`, {when(external.created) or 'undated'}.",
        soft=True,
    )
