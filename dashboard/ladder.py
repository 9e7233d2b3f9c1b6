"""The ladder as cards: how each rung stands in the report, and in the figures of published engines."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from dashboard.external_results import External
from dashboard.report import Report, RunRow
from serving.metrics import METRICS

_NOT_CLIMBED = "Not climbed in this report."


def show_ladder(report: Report | None, external: External | None) -> None:
    """Rungs 1 to 5, three and two in a row, so that they stay readable at 800 pixels."""
    cards: tuple[tuple[str, Callable[[], None]], ...] = (
        ("Rung 1 · Same decisions", lambda: _decisions(report)),
        ("Rung 2 · Step times", lambda: _steps(report)),
        ("Rung 3 · Whole runs", lambda: _runs(report)),
        ("Rung 4 · Engines of others", lambda: _others(external)),
        ("Rung 5 · Bands", lambda: _bands(report, external)),
    )
    for row in (cards[:3], cards[3:]):
        for place, (title, fill) in zip(st.columns(len(row), gap="small"), row, strict=True):
            with place.container(border=True, height="stretch"):
                st.markdown(f"**{title}**")
                fill()


def _decisions(report: Report | None) -> None:
    replay = report.rungs.replay if report else None
    if replay is None:
        st.caption(_NOT_CLIMBED)
    elif replay.identical == replay.steps:
        st.markdown(f":green[:material/check_circle:] **{replay.steps:,} of {replay.steps:,}** steps identical")
        st.caption(
            f"Fed the measured step times, the simulator decides as the engine did, {replay.requests:,} requests."
        )
    else:
        st.markdown(f":red[:material/cancel:] **{replay.identical:,} of {replay.steps:,}** steps identical")
        st.caption(f"First difference: {replay.first_difference or 'not recorded'}")


def _steps(report: Report | None) -> None:
    regimes = report.rungs.step.regimes if report and report.rungs.step else {}
    if not regimes:
        st.caption(_NOT_CLIMBED)
        return
    worst = max((r.median_error_pct for r in regimes.values() if r.median_error_pct is not None), default=None)
    st.markdown(f":blue[:material/timer:] median error **{_percent(worst)}** or less")
    parts = [
        f"{name} {_percent(r.median_error_pct)}, p95 {_percent(r.p95_error_pct)} ({r.steps:,} steps)"
        for name, r in regimes.items()
    ]
    st.caption("On held-out steps: " + "; ".join(parts) + ".")


def _runs(report: Report | None) -> None:
    rows = [row for row in _rows(report) if row.error_pct is not None]
    if not rows:
        st.caption(_NOT_CLIMBED)
        return
    known = [row for row in rows if row.within_floor is not None]
    inside = sum(bool(row.within_floor) for row in known)
    if known:
        st.markdown(f":blue[:material/straighten:] **{inside} of {len(known)}** figures within the real noise")
    else:
        st.markdown(":blue[:material/straighten:] the real run was not repeated")
    furthest = max(rows, key=lambda row: abs(row.error_pct or 0.0) - abs(row.floor_pct or 0.0))
    st.caption(f"{'Closest to its edge' if furthest.within_floor else 'Furthest out'}: {_row(furthest)}.")


def _others(external: External | None) -> None:
    if external is None:
        st.caption("No results of `tokentwin validate external`.")
        return
    targets = external.targets
    met = sum(target.met for target in targets)
    sources = "1 source" if len(external.cases) == 1 else f"{len(external.cases)} sources"
    st.markdown(f":blue[:material/public:] **{met} of {len(targets)}** targets met, {sources}")
    largest = max(external.cases, key=lambda case: len(case.rows))
    medians = [
        f"{label} {error:.1f} %"
        for family, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
        if (error := largest.median_error_pct(family, "blind")) is not None
    ]
    st.caption(
        f"Published runs of vLLM, predicted without having seen them; the largest source, *{largest.title}*: median "
        f"error {', '.join(medians) or 'unknown'}."
    )


def _bands(report: Report | None, external: External | None) -> None:
    banded = [row.covered for row in _rows(report) if row.covered is not None]
    shares = [(sum(banded), len(banded), "of this report's figures")] if banded else []
    if external and external.figures:
        shares.append((external.covered, external.figures, "of the published ones"))
    if not shares:
        st.caption("The report holds no bands; run tokentwin validate again.")
        return
    covered, count, _ = shares[0]
    st.markdown(f":blue[:material/density_medium:] **{covered} of {count}** measured figures in their 90 % band")
    told = ", ".join(f"{100 * covered / count:.0f} % {of}" for covered, count, of in shares)
    st.caption(f"Meant to be 90 %: {told}. Figures of one run are not independent of each other.")


def _rows(report: Report | None) -> list[RunRow]:
    return report.rungs.run.rows if report and report.rungs.run else []


def _row(row: RunRow) -> str:
    name = METRICS[row.metric].label if row.metric in METRICS else row.metric
    floor = "" if row.floor_pct is None else f" (floor {abs(row.floor_pct):.1f} %)"
    stat = "" if row.stat in ("", "value") else f" {row.stat}"
    return f"{name}{stat} {row.error_pct:+.1f} %{floor}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} %"
