"""The state of each rung of the validation ladder, in words, from a report and other results of validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokentwin.calibration.validation.report import Regime, RunRow, ValidationReport
from tokentwin.dashboard.trust_page.results import Clients, Decisions, External, covered, median_errors_pct
from tokentwin.serving.answers.figures import shown_band, shown_change, shown_percent, shown_share
from tokentwin.serving.metrics import label_of

LADDER = "Each check is called a rung. A higher rung checks more, and depends on the rungs below it."
_NOT_CLIMBED = "This report does not contain this check."


class Rung(NamedTuple):
    """The state of a rung: a Material symbol in a colour, a headline with its figure in `**`, and sentences.

    A rung without a headline was not run.
    """

    title: str
    headline: str = ""
    detail: str = _NOT_CLIMBED
    colour: str = "blue"
    symbol: str = ""


def rungs(
    report: ValidationReport | None,
    external: External | None,
    clients: Clients | None = None,
    decisions: Decisions | None = None,
) -> list[Rung]:
    """Return rungs 1 to 7."""
    of_report = _decisions(report), _steps(report), _runs(report)
    return [*of_report, _others(external), _bands(report, external), _front_door(clients), _choices(decisions)]


def _decisions(report: ValidationReport | None) -> Rung:
    title = "Rung 1 · Are scheduling decisions the same?"
    replay = report.rungs.replay if report else None
    if replay is None:
        return Rung(title)
    headline = f"**{replay.identical:,} of {replay.steps:,}** steps identical"
    if replay.identical == replay.steps:
        why = f"All steps of {replay.requests:,} requests, simulated with the measured step times."
        return Rung(title, headline, why, "green", "check_circle")
    return Rung(title, headline, f"First difference: {replay.first_difference or 'not recorded'}", "red", "cancel")


def _steps(report: ValidationReport | None) -> Rung:
    title = "Rung 2 · Are step times right?"
    step = report.rungs.step if report else None
    if step is None or not step.regimes:
        return Rung(title)
    parts = [
        f"{name} {shown_percent(r.median_error_pct)}, p95 {shown_percent(r.p95_error_pct)} ({r.steps:,} steps)"
        for name, r in step.regimes.items()
    ]
    headline = f"median error **{_worst(step.regimes)}** or less"
    why = f"On held-out steps: {'; '.join(parts)}."
    if step.same_weather:
        headline = f"{headline} blind, {_worst(step.same_weather)} with the machine's speed known"
        why = f"{why} With the machine's speed known, CPU times of the steps are compared."
    return _marked(report, Rung(title, headline, why, symbol="timer"))


def _worst(regimes: Mapping[str, Regime]) -> str:
    return shown_percent(
        max((r.median_error_pct for r in regimes.values() if r.median_error_pct is not None), default=None)
    )


def _runs(report: ValidationReport | None) -> Rung:
    title = "Rung 3 · Are latencies of a run right?"
    rows = [row for row in _rows(report) if row.error_pct is not None]
    if not rows:
        return Rung(title)
    noisy, quiet = _noisy(rows), [row for row in rows if not row.noisy]
    same = [row for row in report.known_speed_rows if row.within_floor is not None] if report else []
    if not quiet and not same:
        return _tells_nothing(title, noisy)
    inside = _within_noise(quiet)
    headline = f"**{inside}** errors within the noise of real runs" if inside else "the real run was not repeated"
    if not quiet:
        headline = f"too noisy blind, **{_within_noise(same)}** errors within the noise with the machine's speed known"
    elif same:
        headline = f"{headline} blind, {_within_noise(same)} with the machine's speed known"
    furthest = max(quiet or same, key=lambda row: abs(row.error_pct or 0.0) - abs(row.floor_pct or 0.0))
    edge = "Closest to the noise" if furthest.within_floor else "Farthest outside the noise"
    return _marked(report, Rung(title, headline, f"{edge}: {_row(furthest)}.{noisy}", symbol="straighten"))


def _within_noise(rows: Sequence[RunRow]) -> str:
    """Return how many of the figures with a known noise lie within it; empty if there are no such figures."""
    known = [row.within_floor for row in rows if row.within_floor is not None]
    return f"{sum(known)} of {len(known)}" if known else ""


def _others(external: External | None) -> Rung:
    title = "Rung 4 · Are predictions for other engines right?"
    if external is None:
        return Rung(title, detail="There are no results of tokentwin validate external.")
    targets = external.targets
    met = sum(target.met for target in targets)
    sources = "1 source" if len(external.cases) == 1 else f"{len(external.cases)} sources"
    furthest = max(external.cases, key=lambda case: max(median_errors_pct(case.rows).values(), default=0.0))
    errors, most = (_together(median_errors_pct(runs.rows)) for runs in (external, furthest))
    why = f"Median errors for runs that were not used for the predictions: {errors}. Largest: {furthest.title}, {most}."
    return Rung(title, f"**{met} of {len(targets)}** targets met, {sources}", why, symbol="public")


def _together(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {shown_percent(error)}" for label, error in errors.items()) or "unknown"


def _bands(report: ValidationReport | None, external: External | None) -> Rung:
    title = "Rung 5 · Are the 90 % bands right?"
    rows = _rows(report)
    banded = [row.covered for row in rows if row.covered is not None]
    shares = [(sum(banded), len(banded), "of this report's figures")] if banded else []
    same = [row.covered for row in report.known_speed_rows if row.covered is not None] if report else []
    if same:
        shares.append((sum(same), len(same), "of its figures with the machine's speed known"))
    if external and external.rows:
        shares.append((covered(external.rows), len(external.rows), "of the published figures"))
    if not shares and _noisy(rows):
        return _tells_nothing(title, _noisy(rows))
    if not shares:
        return Rung(title, detail="The report has no bands; run tokentwin validate again.")
    inside, count, _ = shares[0]
    parts = ", ".join(f"{shown_share(inside / count)} {figures}" for inside, count, figures in shares)
    why = f"The bands contain {parts}.{_noisy(rows)}"
    rung = Rung(title, f"**{inside} of {count}** measured figures in their 90 % band", why, symbol="density_medium")
    return _marked(report, rung) if banded or same else rung


def _front_door(clients: Clients | None) -> Rung:
    title = "Rung 6 · Are latencies at the client right?"
    if clients is None:
        return Rung(title, detail="There are no results of tokentwin validate front-door.")
    headline = _errors({label_of(row.metric): row.error_pct for row in clients.means})
    errors = ((label_of(row.metric), row.in_weather_error_pct) for row in clients.means)
    if same := {label: error for label, error in errors if error is not None}:
        headline = f"{headline} blind, {_errors(same)} with the machine's speed known"
    floors = {label_of(row.metric): row.floor_pct for row in clients.means if row.floor_pct is not None}
    why = f"Errors of the mean latencies that clients of a server saw, in {len(clients.clients)} runs of one workload."
    if floors:
        why = f"{why} Repeats differ by {_together(floors)}."
    return Rung(title, f"**{headline}**", why, symbol="door_front")


def _choices(decisions: Decisions | None) -> Rung:
    title = "Rung 7 · Does the simulator choose the right configuration?"
    if decisions is None:
        return Rung(title, detail="There are no results of python -m lab.decisions.")
    ours = decisions.ours
    headline = (
        f"**{shown_share(ours.utility)}** of the best throughput, {shown_share(ours.broke)} of choices broke their SLO"
    )
    others = ", ".join(f"{rule.rule} {shown_share(rule.utility)}" for rule in decisions.rules[1:])
    why = (
        f"In {ours.questions:,} questions the simulator chose one of several measured configurations by predictions "
        f"alone. A choice that breaks its SLO counts as 0 %. 90 % interval "
        f"{shown_band(100 * ours.low, 100 * ours.high)} %. With other rules of choice: {others}."
    )
    return Rung(title, headline, why, symbol="rule")


def _errors(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {shown_change(error)}" for label, error in errors.items())


def _noisy(rows: Sequence[RunRow]) -> str:
    """Return a sentence about the figures that say nothing because of noise; empty if there are none."""
    apart = [abs(row.floor_pct) for row in rows if row.noisy and row.floor_pct is not None]
    if not apart:
        return ""
    most = shown_percent(max(apart), 0)
    return f" {len(apart)} of {len(rows)} figures are left out, because repeats of the real run differ by up to {most}."


def _tells_nothing(title: str, noisy: str) -> Rung:
    return Rung(title, "too noisy to say", noisy.strip(), "gray", "help")


def _marked(report: ValidationReport | None, rung: Rung) -> Rung:
    """Return the rung, in grey if the machine was disturbed while its figures were measured."""
    if report is None or not report.disturbed:
        return rung
    return rung._replace(headline=f"{rung.headline}, on a disturbed machine", colour="gray", symbol="help")


def _rows(report: ValidationReport | None) -> Sequence[RunRow]:
    return report.rows if report else ()


def _row(row: RunRow) -> str:
    name = label_of(row.metric)
    floor = "" if row.floor_pct is None else f" (floor {shown_percent(abs(row.floor_pct))})"
    stat = "" if row.stat in ("", "value") else f" {row.stat}"
    return f"{name}{stat} {row.error_pct:+.1f} %{floor}"
