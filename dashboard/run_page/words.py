"""Texts of a run and of its diagnosis beside their figures, on the page and in a report, and the trust in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokentwin.calibration.trust import UNKNOWN, Trust
from tokentwin.calibration.validation.disturbance import canary_drift
from tokentwin.dashboard.sheet import Fact, Sheet
from tokentwin.planning.capacity import Capacity
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.energy import energy_bands
from tokentwin.planning.run_report import Bands, distributions, scalars
from tokentwin.serving.answers.figures import shown_band, shown_change, shown_number, shown_times
from tokentwin.serving.canary import CALM_DRIFT
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.metrics.saturation import Saturation
from tokentwin.traces.recording import Recording, notes_of


def trust(diagnosis: DiagnosisDocument) -> Trust:
    """Return the trust in the simulation, by its step times and by the error of the run simulated as it was."""
    noted = diagnosis.trust
    if noted is None:
        level, reason = Trust(UNKNOWN, "the diagnosis does not state how far to trust its step times")
    else:
        level, reason = noted.level, noted.reason
    if diagnosis.twin_error is None:
        return Trust(level, reason)
    figure = "share of lost requests" if diagnosis.sheds else "p99"
    return Trust(
        level,
        f"{reason}; the simulated {figure} differs from the recorded one by {shown_change(100 * diagnosis.twin_error)}",
    )


def disturbance(recording: Recording) -> str:
    """Return a warning about a real run on a disturbed machine; empty for any other run."""
    drift, why = canary_drift([([recording], None)])
    if drift <= CALM_DRIFT:
        return ""
    return (
        f"The machine was disturbed during this run: {why}. A canary is a fixed step whose time should never change. "
        "Other work on the machine made some of the times below longer."
    )


LATENCIES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"), ("e2e_ms", "p99"))
RATES = (("output_throughput", "output (tokens/s)"), ("concurrency", "concurrency (mean)"))


def backlog(saturation: Saturation) -> str:
    """Return a clause about whether requests pile up."""
    slope, half = saturation.trend.slope, saturation.trend.half
    return (
        f"the number of unfinished requests changes by {shown_number(slope)} per second (95 % interval "
        f"{shown_band(slope - half, slope + half)}) while {shown_number(saturation.arrival_rate)} requests/s arrive"
    )


def bands_of(run: Mapping[str, Any]) -> Bands:
    """Return the 90 % bands by metric and statistic; empty if the recording has none."""
    bands = notes_of(run).get("bands")
    return bands if isinstance(bands, dict) else {}


def capacity_of(run: Mapping[str, Any]) -> Capacity | None:
    """Return the capacity that a simulated run notes; None if it has none, or one that cannot be read."""
    try:
        return Capacity.model_validate(notes_of(run)["capacity"])
    except (KeyError, ValueError):
        return None


def uncertain(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the latencies that nobody can tell, because requests may pile up."""
    capacity = capacity_of(run)
    return capacity.uncertain if capacity else ()


def headline_figures(run: Mapping[str, Any], metrics: RunMetrics) -> list[Fact]:
    """Return the main figures of a run: latencies at their median and tail, then rates.

    If nobody can tell whether requests pile up, the rate beyond which they do stands for latencies that include
    waiting.
    """
    scalars, bands, figures = metrics.scalars(), bands_of(run), list[Fact]()
    unknown, capacity = uncertain(run), capacity_of(run)
    if capacity and not capacity.is_too_short:
        arriving, served = shown_number(capacity.arrival_rate), shown_number(capacity.value)
        figures += [Fact("arrivals/s", arriving), Fact("served at most/s", served, capacity.band, capacity.sentence)]
    for name, stat in LATENCIES:
        if name in unknown:
            continue
        band = bands.get(name, {}).get(stat, ())
        value = getattr(metrics.distribution(name), stat)
        (text,), unit = shown_times(value, digits=4)  # as in the verdict on an SLO
        ends = shown_times(value, *band)[0][1:]
        figures.append(Fact(f"{metric(name).label} {stat} ({unit})", text, "–".join(ends) or None, metric(name).help))
    for name, label in RATES:
        band = bands.get(name, {}).get("value", ())
        figures.append(Fact(label, shown_number(scalars[name]), shown_band(*band) if band else None, metric(name).help))
    return figures


def show_metrics(to: Sheet, run: Mapping[str, Any], metrics: RunMetrics) -> None:
    """Draw every metric of the recording."""
    bands, gpu = bands_of(run), gpus().get(notes_of(run).get("gpu", ""))
    to.table(distributions(metrics, bands, uncertain(run)))
    to.table(scalars(metrics, {**bands, **energy_bands(metrics, gpu)} if bands and gpu else bands))


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
