"""The report of anything that can be exported, by what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any

from dashboard.html_reports.comparison import comparison_report
from dashboard.html_reports.diagnosis import diagnosis_report
from dashboard.html_reports.document import write_document
from dashboard.html_reports.plan import plan_report
from dashboard.html_reports.recorded_run import run_report
from dashboard.html_reports.sweep import sweep_report
from dashboard.html_reports.validation import validation_report
from planning.compare.document import ComparisonDocument
from planning.diagnose.document import DiagnosisDocument
from planning.exports.exportable import Exportable
from planning.exports.recorded_run import RecordedRun
from planning.exports.sweep import Sweep
from planning.exports.validation import Validation
from planning.plan.document import PlanDocument

_REPORTS: dict[type, Callable[[Any], tuple[str, Iterable[str]]]] = {
    PlanDocument: plan_report,
    ComparisonDocument: comparison_report,
    DiagnosisDocument: diagnosis_report,
    RecordedRun: run_report,
    Sweep: sweep_report,
    Validation: validation_report,
}


def report_of(source: Exportable) -> tuple[str, Iterable[str]]:
    """Its title, and its blocks in HTML. Raises UserError when the source is damaged."""
    return _REPORTS[type(source)](source)


def write_report(source: Exportable, out: IO[bytes]) -> None:
    write_document(out, *report_of(source))
