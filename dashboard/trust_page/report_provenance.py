"""How far to trust what was held against real runs: the simulated run of a validation report, and prices of steps."""

from __future__ import annotations

from collections.abc import Iterable

from calibration.provenance import EXTRAPOLATED, UNKNOWN, VALIDATED, Provenance
from calibration.validation.report import ValidationReport
from dashboard.trust_page.domain import NEGLIGIBLE

_MOST_MEDIAN_PCT = 10.0


def of_report(report: ValidationReport) -> Provenance:
    """How far to trust the simulated run, and why."""
    if report.rungs.run is None or not report.rungs.run.rows:
        return Provenance(UNKNOWN, "the report compares no real run with the simulated one")
    if report.disturbed:
        return Provenance(UNKNOWN, "the machine was disturbed while its real runs were recorded")
    share, held = report.extrapolated_share, "compared with real runs of the same workload"
    if share is None:
        return Provenance(VALIDATED, f"{held}; the report does not say how many steps lie outside what was measured")
    outside = f"{100 * share:.1f} % of the simulated steps lie outside what the calibration measured"
    return Provenance(EXTRAPOLATED, outside) if share > NEGLIGIBLE else Provenance(VALIDATED, f"{held}; {outside}")


def of_steps(count: int, medians_pct: Iterable[float | None], more: str) -> Provenance:
    """Of `count` measured steps held against predictions: by the worst of the regimes' median errors, in percent.

    `more` is the rest of the reason.
    """
    if not count:
        return Provenance(UNKNOWN, "no step was kept to compare predictions with")
    worst = max((abs(median) for median in medians_pct if median is not None), default=0.0)
    if worst > _MOST_MEDIAN_PCT:
        return Provenance(UNKNOWN, f"predictions miss the held-out steps of a regime by {worst:.0f} % (median)")
    return Provenance(VALIDATED, f"{count:,} steps were measured, {more}")
