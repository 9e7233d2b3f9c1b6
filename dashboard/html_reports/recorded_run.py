"""A recorded run as one HTML file: the figures of the Run page, the metrics and where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import plotly.graph_objects as go

from calibration.provenance import of_run
from dashboard.bundled import DEMO, bundled_answer, sample_diagnosis
from dashboard.html_reports.diagnosis import diagnosis_blocks
from dashboard.html_reports.document import beside, details, figure, heading, paragraph, table, warning
from dashboard.library import calibrations, stamp
from dashboard.palette import CLOCK_NAME, run_colour
from dashboard.run_page import charts as run_charts
from dashboard.run_page.explained_steps import explained_steps
from dashboard.run_page.step_time_charts import part_times
from dashboard.run_page.time_window import drawn_over_time
from dashboard.run_page.words import backlog, distribution_rows, headline_figures, scalar_rows
from dashboard.series import column
from dashboard.shown import capitalised, sentence
from dashboard.step_page.charts import roofline
from planning.diagnose.document import DiagnosisDocument
from planning.diagnose.recorded_run import DIAGNOSIS, DIAGNOSIS_FILE
from planning.exports.recorded_run import RecordedRun
from planning.jobs.files import read_json
from planning.jobs.job import finished
from planning.request_endings import RequestEndings
from serving.errors import UserError
from serving.metrics import STATISTICS
from traces.recording import Recording
from traces.run_metrics import RunMetrics

_PROVENANCE = ("run_id", "version", "seed", "calibration", "replicas", "num_blocks", "block_size")


def run_report(source: RecordedRun) -> tuple[str, list[str]]:
    """Its title, and its blocks. Raises UserError when the recording is damaged."""
    recording = source.recording
    metrics, run = RunMetrics.of(recording), recording.run
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    outcome, found = RequestEndings.of(metrics), metrics.saturation
    held, fleet, used = drawn_over_time(recording, metrics)
    facts = (clock, run["workload"], outcome.text, f"{(run['duration_ns'] or 0) / 1e9:,.1f} s")
    blocks = [
        paragraph(" · ".join(filter(None, facts)), soft=True),
        warning(f"{outcome.shortfall}: {outcome.latencies_of}") if outcome.shortfall else "",
        paragraph(f"{capitalised(found.verdict.lower())}: {backlog(found)}", soft=True) if found else "",
        table(
            [{"": each.label, "value": each.value, "90 % band": each.band} for each in headline_figures(run, metrics)]
        ),
        heading("Over time"),
        figure(run_charts.timeline(held, fleet, run_colour(run), used=used), of_run(run)),
        heading("Where step time goes"),
        *_step_time(source),
        *_diagnosis(source),
        heading("Four lifecycles"),
        beside([figure(drawn, of_run(run), name) for name, drawn in _cards(recording, metrics).items()]),
        heading("Distributions"),
        table(distribution_rows(metrics), STATISTICS),
        heading("The run"),
        table(scalar_rows(run, metrics)),
        heading("Where it comes from"),
        _provenance(run),
    ]
    return source.name, blocks


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
    bars = part_times(found.parts_ns, run_colour(recording.run), recording.run["duration_ns"])
    if found.gpu is None:
        yield figure(bars, found.provenance, "By part")
        return
    roofs = roofline(found.operations, found.gpu, found.weights)
    yield beside([figure(bars, found.provenance, "By part"), figure(roofs, found.provenance, "What bounds it")])


def _diagnosis(source: RecordedRun) -> Iterator[str]:
    """The one that lies beside the run, or that was asked for on the Run page; nothing without either."""
    found = _found(source)
    if found is not None:
        yield heading("Why it is slow")
        yield paragraph(sentence(found.verdict))
        yield from diagnosis_blocks(found)


def _found(source: RecordedRun) -> DiagnosisDocument | None:
    path = source.recording.path.resolve()
    saved = path / DIAGNOSIS_FILE
    if saved.exists():
        return DiagnosisDocument.read(read_json(saved))
    here = {"run": str(path), "stamp": stamp(path)}
    jobs = (job for job in finished(source.runs / "jobs", DIAGNOSIS) if here.items() <= job.settings.items())
    answer = next((job.result for job in jobs), None) or bundled_answer(sample_diagnosis(path).as_json())
    return None if answer is None else DiagnosisDocument.read(answer)


def _cards(recording: Recording, metrics: RunMetrics) -> dict[str, go.Figure]:
    gaps = "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    return run_charts.lifecycles(metrics, gaps, metrics.values(gaps), prefill, run_colour(recording.run))


def _provenance(run: dict[str, Any]) -> str:
    facts = " · ".join(f"{name} {run[name]}" for name in _PROVENANCE if run[name] not in (None, ""))
    settings = [details(name, _indented(run[name])) for name in ("deployment", "hardware") if run[name]]
    return "".join([paragraph(facts, soft=True), *settings])


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text
