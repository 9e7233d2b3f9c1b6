"""A recorded run as one HTML file: the figures of the Run page, the metrics and where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import plotly.graph_objects as go

from calibration.standing import of_run
from dashboard import run_charts
from dashboard.bundled import DEMO
from dashboard.explained_steps import explained_steps
from dashboard.fleet_over_time import FleetOverTime
from dashboard.held_steps import HeldSteps
from dashboard.html_reports.document import (
    beside,
    details,
    figure,
    heading,
    named_rows,
    paragraph,
    table,
    warning,
    write_document,
)
from dashboard.library import calibrations
from dashboard.palette import CLOCK, CLOCK_NAME, NEUTRAL
from dashboard.series import column
from dashboard.step_charts import roofline
from dashboard.step_time_charts import part_times
from serving.errors import UserError
from serving.metrics import STATISTICS, metric
from tokentwin.exports.recorded_run import RecordedRun
from tokentwin.outcome import Outcome
from traces.recording import Recording
from traces.run_metrics import RunMetrics

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
_PROVENANCE = ("run_id", "version", "seed", "calibration", "replicas", "num_blocks", "block_size")


def write_html(source: RecordedRun, out: IO[bytes]) -> None:
    """The report. Raises UserError when the recording is damaged."""
    recording = source.recording
    metrics, run = RunMetrics.of(recording), recording.run
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    outcome = Outcome.of(metrics)
    facts = (clock, run["workload"], outcome.text, f"{(run['duration_ns'] or 0) / 1e9:,.1f} s")
    blocks = [
        paragraph(" · ".join(filter(None, facts)), soft=True),
        warning(f"{outcome.shortfall}: {outcome.latencies_of}") if outcome.shortfall else "",
        *(paragraph(line, soft=True) for line in _verdict(metrics)),
        heading("Over time"),
        figure(_timeline(recording, metrics), of_run(run)),
        heading("Where step time goes"),
        *_step_time(source),
        heading("Four lifecycles"),
        beside([figure(drawn, of_run(run), name) for name, drawn in _cards(recording, metrics).items()]),
        heading("Distributions"),
        _distributions(metrics),
        heading("The run"),
        _scalars(metrics),
        heading("Where it comes from"),
        _provenance(run),
    ]
    write_document(out, source.name, blocks)


def _verdict(metrics: RunMetrics) -> list[str]:
    found = metrics.saturation
    if found is None:
        return []
    return [
        f"{found.verdict.lower()}: the backlog changes by {found.slope:+.3g} requests/s "
        f"(95 %: {found.low:+.3g} to {found.high:+.3g}) while {found.arrival_rate:.3g} requests/s arrive"
    ]


def _timeline(recording: Recording, metrics: RunMetrics) -> go.Figure:
    fleet = FleetOverTime.of(recording.run, metrics)
    return run_charts.timeline(HeldSteps.recorded(recording), fleet, _colour(recording))


def _step_time(source: RecordedRun) -> Iterator[str]:
    recording = source.recording
    try:
        found = explained_steps(recording, [*calibrations(source.runs).values(), DEMO / "calibration"])
    except UserError as error:
        yield warning(str(error))
        return
    if isinstance(found, str):
        yield paragraph(found, soft=True)
        return
    yield paragraph(found.how, soft=True)
    bars = part_times(found.parts_ns, _colour(recording), recording.run["duration_ns"])
    if found.gpu is None:
        yield figure(bars, found.standing, "By part")
        return
    roofs = roofline(found.operations, found.gpu, found.weights)
    yield beside([figure(bars, found.standing, "By part"), figure(roofs, found.standing, "What bounds it")])


def _cards(recording: Recording, metrics: RunMetrics) -> dict[str, go.Figure]:
    of, colour = metrics.values, _colour(recording)
    gaps = "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    return {
        "Token": run_charts.histogram(of(gaps), gaps, colour),
        "Compute": run_charts.step_times(of("batch_tokens"), of("step_ms"), prefill, colour),
        "Memory": run_charts.memory_shares(of("kv_usage"), of("kv_pressure"), of("step_ms"), colour),
        "Request": run_charts.phases(of("queue_ms"), of("prefill_ms"), of("decode_ms"), colour),
    }


def _colour(recording: Recording) -> str:
    return CLOCK.get(recording.run["clock"], NEUTRAL)


def _distributions(metrics: RunMetrics) -> str:
    rows = []
    for name, found in metrics.distributions().items():
        if found.count:
            numbers = found.as_dict()
            about = metric(name)
            rows.append({"metric": about.read_as, **{stat: about.read(numbers[stat]) for stat in _STATISTICS}})
    return table(rows, {stat: STATISTICS[stat] for stat in _STATISTICS})


def _scalars(metrics: RunMetrics) -> str:
    rows = []
    for name, value in metrics.scalars().items():
        if value is not None:
            about = metric(name.removesuffix("_peak"))
            label = about.read_as + (" at its peak" if name.endswith("_peak") else "")
            rows.append((label, about.read(value), about.help))
    return named_rows(rows)


def _provenance(run: dict[str, Any]) -> str:
    facts = " · ".join(f"{name} {run[name]}" for name in _PROVENANCE if run[name] not in (None, ""))
    settings = [details(name, _indented(run[name])) for name in ("deployment", "hardware") if run[name]]
    return "".join([paragraph(facts, soft=True), *settings])


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text
