"""A validation report as one HTML file: the verdict, the ladder, and the figures of the Trust page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from calibration.validation.report import ValidationReport, resolve
from dashboard.html_reports.document import badge, code, details, figure, heading, paragraph, table, warning
from dashboard.shown import when
from dashboard.trust_page import charts as trust_charts
from dashboard.trust_page.client_results import newest_clients
from dashboard.trust_page.decision_results import newest_decisions
from dashboard.trust_page.domain import domain, timed_by
from dashboard.trust_page.domain_charts import domain_maps
from dashboard.trust_page.external_charts import errors_by_source
from dashboard.trust_page.external_results import External, newest_external, provenance, source_row
from dashboard.trust_page.latencies import COMPARED, compared_latencies, step_errors
from dashboard.trust_page.rungs import LADDER, rungs
from dashboard.trust_page.words import (
    ERRORS_IN_WEATHER,
    FLOOR,
    IN_WEATHER,
    bias,
    blind_title,
    disturbance,
    figure_rows,
    of_report,
)
from planning.exports.validation import Validation
from serving.errors import UserError
from traces.recording import Recording
from traces.run_metrics import RunMetrics


def validation_report(source: Validation) -> tuple[str, list[str]]:
    """Its title, and its blocks. What of it is damaged is said in a line in its place."""
    report = source.report
    external = newest_external(source.runs)
    facts = (
        report.workload and f"workload {report.workload}",
        report.calibration and f"calibration {report.calibration}",
    )
    blocks = [
        badge(of_report(report)),
        paragraph(FLOOR, soft=True),
        paragraph(" · ".join(fact for fact in (*facts, when(report.created)) if fact), soft=True),
        warning(disturbance(report)) if report.disturbed else "",
        heading("The ladder"),
        paragraph(LADDER, soft=True),
        table(
            [
                {"rung": rung.title, "result": rung.headline.replace("**", ""), "detail": rung.detail}
                for rung in rungs(report, external, newest_clients(source.runs), newest_decisions(source.runs))
            ]
        ),
        *_distributions(source),
        *_errors(report),
        *_steps(source.path, report),
        *_domain(source),
        *_external(external),
        *_origin(report),
    ]
    return report.verdict, blocks


def _distributions(source: Validation) -> Iterator[str]:
    found = compared_latencies(source.path, source.report, lambda path: RunMetrics.of(Recording.load(path)))
    yield heading("Real and simulated latency of all requests")
    yield from map(warning, found.problems)
    if found.real or found.simulated:
        yield figure(trust_charts.cdfs(found.real, found.simulated, COMPARED), found.provenance)


def _errors(report: ValidationReport) -> Iterator[str]:
    yield heading(blind_title(report))
    yield figure(trust_charts.errors(report.rows), of_report(report))
    if report.weather_rows:
        yield heading(IN_WEATHER)
        yield figure(trust_charts.errors(report.weather_rows), of_report(report))
        yield paragraph(ERRORS_IN_WEATHER, soft=True)
    signed = ("error (%)", "its error (%)")
    yield table([row | {name: _signed(row[name]) for name in signed if name in row} for row in figure_rows(report)])


def _steps(directory: Path, report: ValidationReport) -> Iterator[str]:
    if found := step_errors(directory, report):
        yield heading("Step time, predicted against measured")
        yield figure(*found)
        yield paragraph(bias(report), soft=True) if bias(report) else ""


def _domain(source: Validation) -> Iterator[str]:
    """The maps behind the simulated run of the report."""
    name = source.report.recordings.simulated
    if not name:
        return
    yield heading("What was measured, and the steps of this run")
    try:
        recording = Recording.load(resolve(source.path, name))
        timing = timed_by(recording, source.runs, source.report.calibration)
        if timing is None:
            yield paragraph("There is no map: the calibration of the simulated run is not here.", soft=True)
            return
        found = domain(recording, timing)
    except UserError as error:
        yield warning(str(error))
        return
    yield figure(domain_maps(found, recording.run), found.provenance)
    yield paragraph(f"Step times come from {found.about}.", soft=True)


def _external(external: External) -> Iterator[str]:
    yield heading("Published engines, predicted")
    yield figure(errors_by_source(external.cases, "blind"), provenance(external.cases))
    rows = [source_row(case, "blind") for case in external.cases]
    yield table([{name: value for name, value in row.items() if name not in ("engine", "GPU")} for row in rows])
    yield paragraph("TTFT, TPOT and E2E are median absolute errors in percent, of blind predictions.", soft=True)


def _signed(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1f}"


def _origin(report: ValidationReport) -> Iterator[str]:
    yield heading("How to get it again")
    yield paragraph("This command does all of it: real runs, calibration, simulation and the comparison.")
    yield code("tokentwin demo")
    if report.hardware:
        yield details("where this was measured", {name: str(value) for name, value in report.hardware.items()})
