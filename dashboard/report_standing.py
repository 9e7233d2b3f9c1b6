"""How far a validation report says that the simulated run can be trusted."""

from __future__ import annotations

from calibration.standing import EXTRAPOLATED, UNKNOWN, VALIDATED, Standing
from calibration.validation_report import Report
from dashboard.domain import NEGLIGIBLE


def of_report(report: Report) -> Standing:
    """How far to trust the simulated run, and why."""
    if report.rungs.run is None or not report.rungs.run.rows:
        return Standing(UNKNOWN, "the report holds no real run against the simulated one")
    share, held = report.extrapolated_share, "held against real runs of the same workload"
    if report.disturbed:
        held += ", on a machine that was disturbed"
    if share is None:
        return Standing(VALIDATED, f"{held}; the report does not say how many steps lie outside what was measured")
    outside = f"{100 * share:.1f} % of the simulated steps lie outside what the calibration measured"
    return Standing(EXTRAPOLATED, outside) if share > NEGLIGIBLE else Standing(VALIDATED, f"{held}; {outside}")
