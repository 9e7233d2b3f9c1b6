"""What a diagnosis says beside its figure, on the page and in a report: rows of its tables, and how far to trust it."""

from __future__ import annotations

from typing import Any

from calibration.provenance import Provenance, noted
from calibration.steps.coverage import shown_share
from dashboard.shown import shown
from planning.diagnose.document import DiagnosisDocument
from serving.metrics import metric

NO_STEPS = "The recording holds no steps, so compute and memory were not examined."


def symptom_rows(found: DiagnosisDocument) -> list[dict[str, str]]:
    """The worst first."""
    return [
        {
            "symptom": symptom.name,
            "lifecycle": symptom.lifecycle,
            "evidence": symptom.evidence,
            "how to test it": symptom.proof,
        }
        for symptom in found.symptoms
    ]


def lift_rows(found: DiagnosisDocument) -> list[dict[str, Any]]:
    """The run as it was, then without each constraint: what is left of every latency."""
    was: dict[str, Any] = {"with": "the run as it was", "problem of": ""}
    rows = [was, *({"with": tried.name, "problem of": tried.kind} for tried in found.tried)]
    if found.sheds:
        for row, share in zip(rows, (found.simulated_finished, *(t.finished for t in found.tried)), strict=True):
            row["requests that finish"] = None if share is None else shown_share(share)
    for name, before in found.simulated_p99.items():
        column = f"{metric(name).label} p99{' of those' if found.sheds else ''} (ms)"
        changed = (f"{_ms(t.p99.get(name), found.sheds)} ({_change(t.bought.get(name))})" for t in found.tried)
        for row, cell in zip(rows, (shown(before), *changed), strict=True):
            row[column] = cell
    return rows


def provenance(found: DiagnosisDocument) -> Provenance:
    """Of what was simulated: of its step times, and how far the run as it was is off."""
    noting = found.standing and {"mark": found.standing.mark, "reason": found.standing.reason}
    mark, reason = noted(noting, "the diagnosis does not say how far its step times can be trusted")
    if found.twin_error is None:
        return Provenance(mark, reason)
    of = "share of lost requests" if found.sheds else "p99"
    return Provenance(mark, f"{reason}; the simulated {of} is {100 * found.twin_error:+.1f} % off the recorded")


def _ms(value: float | None, sheds: bool) -> str:
    """No number: of requests that finish there is none, of all requests it is beyond all numbers."""
    return shown(value) if value is not None or sheds else "never"


def _change(share: float | None) -> str:
    return "–" if share is None else f"{round(-100 * share):+d} %"
