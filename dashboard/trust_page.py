"""Trust: how far the simulator is from the real engine, from a validation report."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import streamlit as st

from dashboard import trust_charts
from dashboard.library import REPORT, find
from dashboard.loading import COMPARED, compared_values
from dashboard.report import Report, Rungs, RunRow, load_report, load_residuals, resolve
from dashboard.url import choose, switch
from serving.errors import UserError
from serving.metrics import METRICS, metric


def show(runs: Path) -> None:
    """The page, over the reports under `runs`."""
    reports = find(runs, REPORT)
    if not reports:
        _nothing(runs)
        return
    title, chooser = st.columns([2, 1], vertical_alignment="bottom")
    with title:
        st.title("Can you trust the numbers?", anchor=False)
    with chooser:
        name = choose("Validation report", list(reports), "report")
    try:
        report = load_report(reports[name])
    except UserError as error:
        st.error(str(error), icon=":material/error:")
        return
    _verdict(report)
    _ladder(report.rungs)
    _distributions(reports[name], report)
    _errors(report)
    _steps(reports[name], report)
    _provenance(report)


def _nothing(runs: Path) -> None:
    st.title("Can you trust the numbers?", anchor=False)
    st.info(f"No validation report under `{runs}` yet.", icon=":material/balance:")
    st.markdown(
        "This page holds the simulator against the real engine, once there is something to hold it against. "
        "The whole loop, real runs, calibration, simulation and the comparison, takes a few minutes on a laptop:"
    )
    st.code("tokentwin demo", language="bash")
    st.markdown("Or validate a trace of your own:")
    st.code("tokentwin validate --help", language="bash")


def _verdict(report: Report) -> None:
    st.markdown(f"### {report.verdict}")
    facts = [
        report.workload and f"workload **{report.workload}**",
        report.calibration and f"calibration {report.calibration}",
        _when(report.created),
    ]
    st.caption(" · ".join(fact for fact in facts if fact))
    if report.disturbed:
        text = report.disturbance or "its canary steps drifted"
        st.warning(
            f"**This run was disturbed**: {text.rstrip('.')}. Something else used the machine while the real engine "
            "ran, so part of the error below is the machine's. Run it again on a quiet one.",
            icon=":material/warning:",
        )
    if report.extrapolated_share:
        st.info(
            f"**{100 * report.extrapolated_share:.1f} %** of the simulated steps lie outside what the calibration "
            "measured; their times are extrapolated.",
            icon=":material/explore:",
        )


def _ladder(rungs: Rungs) -> None:
    first, second, third = st.columns(3, gap="medium")
    with first.container(border=True, height="stretch"):
        st.markdown("**Rung 1 · Same decisions**")
        replay = rungs.replay
        if replay is None:
            st.caption("Not climbed in this report.")
        elif replay.identical == replay.steps:
            st.markdown(f":green[:material/check_circle:] **{replay.steps:,} of {replay.steps:,}** steps identical")
            st.caption(
                f"Fed the measured step times, the simulator decides as the engine did, {replay.requests:,} requests."
            )
        else:
            st.markdown(f":red[:material/cancel:] **{replay.identical:,} of {replay.steps:,}** steps identical")
            st.caption(f"First difference: {replay.first_difference or 'not recorded'}")
    with second.container(border=True, height="stretch"):
        st.markdown("**Rung 2 · Step times**")
        regimes = rungs.step.regimes if rungs.step else {}
        if not regimes:
            st.caption("Not climbed in this report.")
        else:
            worst = max((r.median_error_pct for r in regimes.values() if r.median_error_pct is not None), default=None)
            st.markdown(f":blue[:material/timer:] median error **{_percent(worst)}** or less")
            parts = [
                f"{name} {_percent(r.median_error_pct)}, p95 {_percent(r.p95_error_pct)} ({r.steps:,} steps)"
                for name, r in regimes.items()
            ]
            st.caption("On held-out steps: " + "; ".join(parts) + ".")
    with third.container(border=True, height="stretch"):
        st.markdown("**Rung 3 · Whole runs**")
        rows = [row for row in (rungs.run.rows if rungs.run else []) if row.error_pct is not None]
        if not rows:
            st.caption("Not climbed in this report.")
        else:
            known = [row for row in rows if row.within_floor is not None]
            inside = sum(bool(row.within_floor) for row in known)
            if known:
                st.markdown(f":blue[:material/straighten:] **{inside} of {len(known)}** figures within the real noise")
            else:
                st.markdown(":blue[:material/straighten:] the real run was not repeated")
            furthest = max(rows, key=lambda row: abs(row.error_pct or 0.0) - abs(row.floor_pct or 0.0))
            st.caption(f"{'Closest to its edge' if furthest.within_floor else 'Furthest out'}: {_row(furthest)}.")


def _distributions(directory: Path, report: Report) -> None:
    heading, toggle = st.columns([5, 1], vertical_alignment="bottom")
    with heading:
        st.subheader(
            "Real and simulated, request by request",
            anchor=False,
            help="\n\n".join(metric(name).help for name in COMPARED),
        )
    with toggle:
        log_x = switch(
            "Log time",
            "log",
            help="A logarithmic axis shows the whole tail. A linear one ends at 1.3 times the largest p99.",
        )
    problems: list[str] = []
    real = []
    for recording in report.recordings.real:
        try:
            real.append(compared_values(resolve(directory, recording)))
        except UserError as error:
            problems.append(str(error))
    simulated = None
    if report.recordings.simulated:
        try:
            simulated = compared_values(resolve(directory, report.recordings.simulated))
        except UserError as error:
            problems.append(str(error))
    for problem in problems:
        st.warning(problem, icon=":material/error:")
    if real or simulated:
        st.plotly_chart(trust_charts.cdfs(real, simulated, COMPARED, log_x), key="cdfs", config=_BAR)
    elif not problems:
        st.caption("The report names no recordings.")


def _errors(report: Report) -> None:
    rows = report.rungs.run.rows if report.rungs.run else []
    st.subheader(
        "Error against the noise floor",
        anchor=False,
        help="A bar is how far the simulated statistic lies from the real one. The orange band is how far repeats of "
        "the same real run lie from each other: nothing can be predicted better than it repeats.",
    )
    st.plotly_chart(trust_charts.errors(rows), key="errors", config=_BAR)
    if rows:
        with st.expander("The figures"):
            st.dataframe(
                [
                    {
                        "metric": METRICS[row.metric].axis if row.metric in METRICS else row.metric,
                        "statistic": row.stat,
                        "real": row.real,
                        "simulated": row.simulated,
                        "error (%)": row.error_pct,
                        "floor (%)": row.floor_pct,
                        "within the floor": row.within_floor,
                    }
                    for row in rows
                ],
                hide_index=True,
                column_config={
                    name: st.column_config.NumberColumn(format=form)
                    for name, form in {
                        "real": "%.2f",
                        "simulated": "%.2f",
                        "error (%)": "%+.1f",
                        "floor (%)": "%.1f",
                    }.items()
                },
            )


def _steps(directory: Path, report: Report) -> None:
    try:
        table = load_residuals(directory)
    except UserError as error:
        st.error(str(error), icon=":material/error:")
        return
    st.subheader(
        "Step time, predicted against measured",
        anchor=False,
        help="Held-out steps, which the calibration did not see. A decode step advances running requests by one token "
        "each, a prefill step computes prompts, a mixed step does both.",
    )
    if table is None:
        st.caption("The report holds no step residuals.")
        return
    columns = (table[name].to_numpy(zero_copy_only=False) for name in ("regime", "measured_ns", "predicted_ns"))
    st.plotly_chart(trust_charts.residuals(*columns), key="residuals", config=_BAR)
    regimes = report.rungs.step.regimes if report.rungs.step else {}
    biases = [f"{name} {r.bias_pct:+.1f} %" for name, r in regimes.items() if r.bias_pct is not None]
    if biases:
        st.caption("Bias (mean signed error): " + ", ".join(biases) + ".")


def _provenance(report: Report) -> None:
    if report.hardware:
        with st.expander("Where this was measured"):
            st.table({name: str(value) for name, value in report.hardware.items()})


def _when(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return created


def _row(row: RunRow) -> str:
    name = METRICS[row.metric].label if row.metric in METRICS else row.metric
    floor = "" if row.floor_pct is None else f" (floor {abs(row.floor_pct):.1f} %)"
    stat = "" if row.stat in ("", "value") else f" {row.stat}"
    return f"{name}{stat} {row.error_pct:+.1f} %{floor}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} %"


_BAR = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}
