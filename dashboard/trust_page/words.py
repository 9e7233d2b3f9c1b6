"""Texts of a validation report beside its figures, on the page and in a file."""

from __future__ import annotations

from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.dashboard.shown import when
from tokentwin.serving.answers.figures import shown_change

CANARY = "A canary step is a fixed step that is repeated during the run; its time should never change. "
FLOOR = (
    "Blind: the simulation knew the requests and the calibration, and nothing of the real run. The noise floor is the "
    "difference between repeated real runs of the same requests. Decided alike: the simulated and the real scheduler "
    "chose the same requests and tokens in a step."
)
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
