"""Texts of a validation report beside its figures, on the page and in a file, and the trust in them."""

from __future__ import annotations

from collections.abc import Iterable

from calibration.trust import EXTRAPOLATED, UNKNOWN, VALIDATED, Trust
from calibration.validation.report import ValidationReport
from dashboard.shown import when
from dashboard.trust_page.domain import NEGLIGIBLE
from serving.answers.figures import shown_change, shown_percent, shown_share

CANARY = "A canary step is a fixed step that is repeated during the run; its time should never change. "
FLOOR = "The noise floor is the difference between repeated real runs of the same requests."
AT_KNOWN_SPEED = "Error with the machine's speed known"
ERRORS_AT_KNOWN_SPEED = (
    "The simulator knows the machine's speed at each moment of the real run, and nothing else about that run. The "
    "remaining error is that of the simulator. The orange band is the noise floor."
)


def disturbance(report: ValidationReport) -> str:
    """Return a warning about disturbed real runs; empty if they were not disturbed."""
    if not report.disturbed:
        return ""
    reason = (report.disturbance or "its canary steps drifted").rstrip(".")
    return (
        f"This run was disturbed: {reason}. {CANARY}Other programs used the machine while the real engine ran, so part "
        "of the error below comes from the machine. Repeat the run on a quiet machine."
    )


def blind_title(report: ValidationReport) -> str:
    """Return the title of the figure of blind errors, which may be the only one."""
    return "Error of the blind prediction" if report.known_speed_rows else "Error against the noise floor"


def made_of(report: ValidationReport) -> str:
    """Return what was compared, on which engine, and when."""
    facts = (
        report.workload,
        f"on {engine_of(report)}",
        report.calibration and f"calibration {report.calibration}",
        when(report.created),
    )
    return " · ".join(filter(None, facts))


def engine_of(report: ValidationReport) -> str:
    """Return the common name of the engine of the real runs."""
    version = report.hardware.get("vllm")
    return f"vLLM {version}" if version else "our engine"


def bias(report: ValidationReport) -> str:
    """Return the mean signed error of step times, by regime; empty if it is not known."""
    regimes = report.rungs.step.regimes if report.rungs.step else {}
    biases = [f"{name} {shown_change(r.bias_pct)}" for name, r in regimes.items() if r.bias_pct is not None]
    return f"Bias (mean signed error): {', '.join(biases)}." if biases else ""


_MOST_MEDIAN_PCT = 10.0


def of_report(report: ValidationReport) -> Trust:
    """Return the trust in the simulated run, with the reason."""
    if report.rungs.run is None or not report.rungs.run.rows:
        return Trust(UNKNOWN, "the report compares no real run with the simulation")
    if report.disturbed:
        return Trust(UNKNOWN, "the machine was disturbed during the real runs")
    share, compared = report.extrapolated_share, "compared with real runs of the same workload"
    if share is None:
        return Trust(VALIDATED, f"{compared}; the report does not say how many steps lie outside the measured range")
    outside = f"{shown_share(share, 1)} of the simulated steps lie outside the measured range of the calibration"
    return Trust(EXTRAPOLATED, outside) if share > NEGLIGIBLE else Trust(VALIDATED, f"{compared}; {outside}")


def of_steps(count: int, medians_pct: Iterable[float | None], more: str) -> Trust:
    """Return the trust in `count` measured steps against predictions, by the worst median error of the regimes.

    Median errors are in percent; `more` is the rest of the reason.
    """
    if not count:
        return Trust(UNKNOWN, "no measured step was held out for a comparison")
    worst = max((abs(median) for median in medians_pct if median is not None), default=0.0)
    if worst > _MOST_MEDIAN_PCT:
        return Trust(UNKNOWN, f"for one kind of held-out steps the median error is {shown_percent(worst, 0)}")
    return Trust(VALIDATED, f"{count:,} steps were measured, {more}")
