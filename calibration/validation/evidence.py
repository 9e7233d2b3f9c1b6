"""The trust in a run, a report and single steps, by comparisons with the real engine. All pages take it from here.

A run that `tokentwin validate` compared with real runs is as certain as its report says; other simulated runs note how
certain their step times are.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokentwin.calibration.trust import EXTRAPOLATED, UNKNOWN, VALIDATED, Trust, trust_in_run
from tokentwin.calibration.validation.report import REPORT, ValidationReport, load_report, resolve
from tokentwin.serving.answers.figures import shown_change, shown_percent, shown_share
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import label_of
from tokentwin.traces.recording import Recording

NEGLIGIBLE = 0.01  # share of steps outside the measured range that does not change the trust in a run
MOST_MEDIAN_PCT = 10.0  # largest error of a median at which a prediction counts as validated


def trust_in_recording(recording: Recording) -> Trust:
    """Return the trust in a recording: of the report beside it if that compared it with real runs, else its own."""
    folder = recording.path.parent
    if recording.run["clock"] == "virtual" and (folder / REPORT).is_file():
        try:
            report = load_report(folder)
        except UserError:
            return trust_in_run(recording.run)
        simulated = report.recordings.simulated
        if simulated and resolve(folder, simulated).resolve() == recording.path.resolve():
            return trust_in_report(report)
    return trust_in_run(recording.run)


def trust_in_report(report: ValidationReport) -> Trust:
    """Return the trust in the simulated run of a report, with the reason.

    The run is not validated if a median is off by more than `MOST_MEDIAN_PCT` and by more than real runs differ.
    """
    if report.rungs.run is None or not report.rungs.run.rows:
        return Trust(UNKNOWN, "the report compares no real run with the simulation")
    if report.disturbed:
        return Trust(UNKNOWN, "the machine was disturbed during the real runs")
    compared = [row for row in report.rows if row.stat == "p50" and not row.noisy]
    medians = [(row, row.error_pct) for row in compared if row.error_pct is not None]
    if not medians:
        return Trust(UNKNOWN, "no median could be compared: repeats differ too much")
    far = [(row, error) for row, error in medians if abs(error) > max(MOST_MEDIAN_PCT, abs(row.floor_pct or 0.0))]
    if far:
        row, error = max(far, key=lambda pair: abs(pair[1]))
        real = "" if row.floor_pct is None else f", and real runs differ by {shown_percent(abs(row.floor_pct))}"
        return Trust(UNKNOWN, f"{label_of(row.metric)} p50 differs from the real run by {shown_change(error)}{real}")
    share, how = report.extrapolated_share, "compared with real runs of the same workload"
    if share is None:
        return Trust(VALIDATED, f"{how}; the report does not say how many steps lie outside the measured range")
    outside = f"{shown_share(share, 1)} of the simulated steps lie outside the measured range of the calibration"
    return Trust(EXTRAPOLATED, outside) if share > NEGLIGIBLE else Trust(VALIDATED, f"{how}; {outside}")


def trust_in_steps(count: int, medians_pct: Iterable[float | None], more: str) -> Trust:
    """Return the trust in `count` measured steps against predictions, by the worst median error of the regimes.

    Median errors are in percent; `more` is the rest of the reason.
    """
    if not count:
        return Trust(UNKNOWN, "no measured step was held out for a comparison")
    worst = max((abs(median) for median in medians_pct if median is not None), default=None)
    if worst is None:
        return Trust(UNKNOWN, "no median error of a held-out step is known")
    if worst > MOST_MEDIAN_PCT:
        return Trust(UNKNOWN, f"for one kind of held-out steps the median error is {shown_percent(worst, 0)}")
    return Trust(VALIDATED, f"{count:,} steps were measured, {more}")
