"""A diagnosis as one HTML file, or as a part of the report of the run that it is of."""

from __future__ import annotations

from collections.abc import Iterator

from dashboard.html_reports.document import figure, heading, origin, paragraph, table, warning
from dashboard.run_page.diagnosis_charts import what_it_buys
from dashboard.run_page.words import NO_STEPS, lift_rows, provenance, symptom_rows
from dashboard.shown import sentence
from planning.diagnose.document import DiagnosisDocument


def diagnosis_report(found: DiagnosisDocument) -> tuple[str, list[str]]:
    return sentence(found.summary or found.verdict), [
        *diagnosis_blocks(found),
        origin(found.version, found.inputs, "Run"),
    ]


def diagnosis_blocks(found: DiagnosisDocument) -> Iterator[str]:
    """Symptoms, and what lifting each constraint would buy."""
    yield heading("Symptoms")
    yield table(symptom_rows(found)) or paragraph("No symptom found.")
    if not found.steps:
        yield paragraph(NO_STEPS, soft=True)
    if not found.counterfactuals:
        return
    yield heading("What would help")
    yield from (paragraph(f"{asked.question} {asked.text}") for asked in found.questions)
    if found.changes:
        yield paragraph(f"To see what the change buys that is worth most: {found.command(found.changes[0])}")
    yield warning(sentence(found.warning)) if found.warning else ""
    yield figure(what_it_buys(found), provenance(found))
    yield table(lift_rows(found))
    yield from (
        paragraph(f"{c.name} was not tried: {c.skipped}", soft=True) for c in found.counterfactuals if c.skipped
    )
