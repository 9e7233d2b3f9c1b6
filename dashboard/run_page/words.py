"""Texts of a run and of its diagnosis beside their figures, on the page and in a report, and how far to trust them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from calibration.trust import UNKNOWN, Trust
from calibration.validation.disturbance import canary_drift
from dashboard.sheet import Fact, Sheet
from planning.diagnose.document import AS_IT_WAS, RECORDING, DiagnosisDocument
from serving.canary import CALM_DRIFT
from serving.figures import shown_band, shown_change, shown_number, shown_share, shown_times
from serving.metrics import STATISTICS, metric
from traces.recording import Recording
from traces.recording_notes import notes_of
from traces.run_metrics import RunMetrics
from traces.saturation import Saturation

NO_STEPS = "The recording holds no steps, so compute and memory were not examined."


def symptom_rows(diagnosis: DiagnosisDocument) -> list[dict[str, str]]:
    """Return a row for each symptom, the worst first."""
    return [
        {
            "symptom": symptom.name,
            "lifecycle": symptom.lifecycle,
            "evidence": symptom.evidence,
            "how to test it": symptom.proof,
        }
        for symptom in diagnosis.symptoms
    ]


def lift_rows(diagnosis: DiagnosisDocument) -> list[dict[str, Any]]:
    """Return latencies in the recording, in the run simulated as it was, without each constraint, and with each change.

    Ideals that cannot be bought have an asterisk.
    """
    others = diagnosis.with_changes
    rows: list[dict[str, Any]] = [{"with": RECORDING, "problem of": ""}, {"with": AS_IT_WAS, "problem of": ""}]
    rows += [{"with": tried.called, "problem of": tried.kind} for tried in others]
    if diagnosis.sheds:
        shares = (diagnosis.recorded_finished, diagnosis.simulated_finished, *(t.finished for t in others))
        for row, share in zip(rows, shares, strict=True):
            row["requests that finish"] = shown_share(share, 1)
    for name, before in diagnosis.simulated_p99.items():
        column = f"{metric(name).label} p99{' of those' if diagnosis.sheds else ''}"
        cells = (
            *map(diagnosis.p99, (diagnosis.recorded_p99.get(name), before)),
            *(diagnosis.changed_p99(t, name) for t in others),
        )
        for row, cell in zip(rows, cells, strict=True):
            row[column] = cell
    return rows


def trust(diagnosis: DiagnosisDocument) -> Trust:
    """Return the trust in the simulation: in its step times, and how far the run simulated as it was is off."""
    noted = diagnosis.trust
    if noted is None:
        level, reason = Trust(UNKNOWN, "the diagnosis does not say how far its step times can be trusted")
    else:
        level, reason = noted.level, noted.reason
    if diagnosis.twin_error is None:
        return Trust(level, reason)
    of = "share of lost requests" if diagnosis.sheds else "p99"
    return Trust(level, f"{reason}; the simulated {of} is {shown_change(100 * diagnosis.twin_error)} off the recorded")


def disturbance(recording: Recording) -> str:
    """Return a warning about a real run on a disturbed machine; empty for any other run."""
    drift, why = canary_drift([([recording], None)])
    if drift <= CALM_DRIFT:
        return ""
    return (
        f"The machine was disturbed during this run: {why}. The canary is a fixed step that should always take as "
        "long. Part of the times below comes from what else ran on the machine."
    )


Bands = Mapping[str, Mapping[str, tuple[float, float]]]
_LATENCIES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"), ("e2e_ms", "p99"))
_RATES = (("output_throughput", "output (tokens/s)"), ("concurrency", "concurrency (mean)"))
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def backlog(saturation: Saturation) -> str:
    """Return a clause about whether requests pile up."""
    slope, half = saturation.trend.slope, saturation.trend.half
    return (
        f"the backlog changes by {shown_number(slope)} requests/s (95 %: {shown_band(slope - half, slope + half)}) "
        f"while {shown_number(saturation.arrival_rate)} requests/s arrive"
    )


def bands_of(run: Mapping[str, Any]) -> Bands:
    """Return the 90 % bands by metric and statistic; empty if the recording has none."""
    bands = notes_of(run).get("bands")
    return bands if isinstance(bands, dict) else {}


def headline_figures(run: Mapping[str, Any], metrics: RunMetrics) -> list[Fact]:
    """Return the main figures of a run: latencies at their median and tail, then rates."""
    scalars, bands, figures = metrics.scalars(), bands_of(run), []
    for name, stat in _LATENCIES:
        band = bands.get(name, {}).get(stat, ())
        value = getattr(metrics.distribution(name), stat)
        (text, *ends), unit = shown_times(value, *band)
        figures.append(Fact(f"{metric(name).label} {stat} ({unit})", text, "–".join(ends) or None, metric(name).help))
    for name, label in _RATES:
        band = bands.get(name, {}).get("value", ())
        figures.append(Fact(label, shown_number(scalars[name]), shown_band(*band) if band else None, metric(name).help))
    return figures


def distribution_rows(metrics: RunMetrics) -> list[dict[str, Any]]:
    """Return a row for each metric that requests or steps have a value of."""
    rows = []
    for name, distribution in metrics.distributions().items():
        if distribution.count:
            about, numbers = metric(name), distribution.as_dict()
            cells = {statistic: about.shown(numbers[statistic]) for statistic in _STATISTICS}
            rows.append({"metric": about.read_as, **cells, "values": distribution.count})
    return rows


def scalar_rows(run: Mapping[str, Any], metrics: RunMetrics) -> list[dict[str, str]]:
    """Return a row for each known metric of the whole run."""
    bands, rows = bands_of(run), []
    for name, value in metrics.scalars().items():
        if value is None:
            continue
        about = metric(name.removesuffix("_peak"))
        band = bands.get(name, {}).get("value")
        rows.append(
            {
                "metric": about.read_as + (" at its peak" if name.endswith("_peak") else ""),
                "value": about.shown(value),
                "90 % band": shown_band(*map(about.read, band)) if band else "",
                "definition": about.definition,
            }
        )
    return rows


def show_metrics(to: Sheet, run: Mapping[str, Any], metrics: RunMetrics) -> None:
    """Draw every metric of the recording."""
    formats = {"values": "localized", **dict.fromkeys(STATISTICS, "right")}
    to.table(distribution_rows(metrics), formats, STATISTICS, height="content")
    to.table(scalar_rows(run, metrics), wrapped=True)  # a wrapped table does not cut definitions off


def show_origin(to: Sheet, run: Mapping[str, Any]) -> None:
    """Draw the deployment, the hardware and the notes of the recording."""
    for title in ("deployment", "hardware", "notes"):
        if run[title]:
            to.text(f"**{title.capitalize()}**")
            try:
                to.settings(json.loads(run[title]))
            except ValueError:
                to.code(run[title])
    names = ("run_id", "version", "seed", "calibration", "replicas", "num_blocks", "block_size")
    to.text(" · ".join(f"{name} {run[name]}" for name in names if run[name] not in (None, "")), soft=True)
