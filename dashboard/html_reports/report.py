"""Reports in one HTML file: the content of the pages, drawn by their own functions, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokentwin.calibration.validation.evidence import trust_in_recording, trust_in_report
from tokentwin.calibration.validation.report import resolve
from tokentwin.dashboard.bundled import DEMO, EXTERNAL_SAMPLE, bundled_answer, sample_diagnosis
from tokentwin.dashboard.frontier_page.answer import show_engines
from tokentwin.dashboard.html_reports.document import Document, write_document
from tokentwin.dashboard.library import calibrations, stamp
from tokentwin.dashboard.palette import CLOCK_NAME, run_colour
from tokentwin.dashboard.plan_page import answer as plan_answer
from tokentwin.dashboard.plan_page import words as plan_words
from tokentwin.dashboard.plan_page.command import plan_command
from tokentwin.dashboard.policy_lab_page import words as lab_words
from tokentwin.dashboard.policy_lab_page.answer import show_comparison
from tokentwin.dashboard.run_page import charts as run_charts
from tokentwin.dashboard.run_page import words as run_words
from tokentwin.dashboard.run_page.diagnosis_view import show_changes
from tokentwin.dashboard.run_page.explained_steps import explained_steps
from tokentwin.dashboard.run_page.step_time import show_step_time
from tokentwin.dashboard.run_page.time_window import drawn_over_time
from tokentwin.dashboard.series import column
from tokentwin.dashboard.sheet import Sheet, show
from tokentwin.dashboard.shown import capitalised, sentence
from tokentwin.dashboard.sweeps_page import charts as sweep_charts
from tokentwin.dashboard.trust_page import answer as trust_answer
from tokentwin.dashboard.trust_page import words as trust_words
from tokentwin.dashboard.trust_page.domain import domain, timed_by
from tokentwin.dashboard.trust_page.domain_view import TITLE, show_maps
from tokentwin.dashboard.trust_page.own_question import judged, questions
from tokentwin.dashboard.trust_page.results import load_external, newest_clients, newest_decisions, newest_external
from tokentwin.dashboard.trust_page.rungs import LADDER, rungs
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.diagnose.recorded_run import DIAGNOSIS, DIAGNOSIS_FILE
from tokentwin.planning.exports.exportable import Exportable
from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.planning.exports.sweep import Sweep
from tokentwin.planning.exports.validation import Validation
from tokentwin.planning.jobs.files import read_json
from tokentwin.planning.jobs.job import finished
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.most_clients import MostClientsDocument
from tokentwin.planning.run_report import RequestEndings
from tokentwin.serving.answers.report import Column, Table
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

_ROWS = 1000  # rows of a sweep; Parquet and CSV have all
_VALUES = 100  # values of a parameter


def report_of(source: Exportable) -> tuple[str, list[str]]:
    """Return the title of a report, and its blocks in HTML. Raises UserError if the source is damaged."""
    document = Document()
    return _REPORTS[type(source)](document, source), document.blocks


def write_report(source: Exportable, out: IO[bytes]) -> None:
    write_document(out, *report_of(source))


def _plan(to: Sheet, answer: PlanDocument) -> str:
    best, drawn = answer.recommendation, plan_answer.figures(answer)
    to.text(" ".join(filter(None, (answer.answer, answer.risk_told))))
    to.text(f"SLOs: {', '.join(answer.objectives)}.", soft=True)
    if best:
        to.badge(plan_words.trust(best.trust))
        for question in questions(answer):
            to.text(judged(question, load_external(EXTERNAL_SAMPLE)).sentence, soft=True)
        if answer.too_short:
            to.warning(sentence(answer.too_short))
        plan_answer.show_winning_mix(to, answer, best)
        plan_answer.show_recommended(to, answer, best, drawn)
        with to.fold("The complete deployment of one replica"):
            to.settings(best.deployment)
    if answer.points:
        to.heading("All fleets of the plan", None)
        to.text(f"{len(answer.points)} fleets, each simulated with the same {answer.requests:,} requests.", soft=True)
        show_engines(to, answer)
        to.table(plan_words.every_fleet(answer, answer.place(best) if best else None))
    plan_answer.show_others(to, answer)
    plan_answer.show_traffic(to, answer.traffic, drawn)
    _again(to, answer.version, answer.inputs, "Plan", *plan_command(answer.inputs))
    return plan_words.answer_name(answer, best) if best else "No fleet"


def _most_clients(to: Sheet, answer: MostClientsDocument) -> str:
    show(to, answer.report())
    to.text(f"SLOs: {', '.join(answer.objectives)}.", soft=True)
    _again(to, answer.version, answer.inputs, "Plan", *plan_command(answer.inputs))
    return "How many users?"


def _comparison(to: Sheet, answer: ComparisonDocument) -> str:
    to.badge(lab_words.trust(answer))
    show_comparison(to, answer)
    _again(to, answer.version, answer.inputs, "Policy lab")
    return capitalised(answer.verdict)


def _diagnosis(to: Sheet, diagnosis: DiagnosisDocument) -> str:
    _diagnosed(to, diagnosis)
    _again(to, diagnosis.version, diagnosis.inputs, "Run")
    return sentence(diagnosis.finding())


def _diagnosed(to: Sheet, diagnosis: DiagnosisDocument) -> None:
    to.heading("Symptoms", None)
    to.text("" if diagnosis.symptoms else "No symptom found.")
    show(to, diagnosis.shown_symptoms())
    if diagnosis.counterfactuals:
        show_changes(to, diagnosis, diagnosis.command(diagnosis.best) if diagnosis.best else "")


def _run(to: Sheet, source: RecordedRun) -> str:
    recording = source.recording
    metrics, run = RunMetrics.from_recording(recording), recording.run
    outcome = RequestEndings.from_metrics(metrics)
    series, fleet, used = drawn_over_time(recording, metrics)
    seconds, clock = f"{(run['duration_ns'] or 0) / 1e9:,.1f} s", CLOCK_NAME.get(run["clock"], "unknown clock")
    to.text(" · ".join(filter(None, (clock, run["workload"], outcome.text, seconds))), soft=True)
    if outcome.shortfall:
        to.warning(f"{outcome.shortfall}: {outcome.latencies_of}")
    if capacity := run_words.capacity_of(run):
        to.warning(sentence(capacity.sentence))
    elif saturation := metrics.saturation:
        to.text(f"{capitalised(saturation.verdict.lower())}: {run_words.backlog(saturation)}", soft=True)
    to.badge(trust_in_recording(recording))
    to.facts(run_words.headline_figures(run, metrics))
    drawn = run_charts.timeline(series, fleet, run_colour(run), used=used)
    to.figure(drawn, "timeline", "Over time", trust_in_recording(recording))
    to.heading("Where step time goes", None)
    try:
        steps = explained_steps(recording, [*calibrations(source.runs).values(), DEMO / "calibration"])
        if isinstance(steps, str):
            to.text(steps, soft=True)
        else:
            show_step_time(to, steps, run)
    except UserError as error:
        to.warning(str(error))
    if (diagnosis := _diagnosis_of(source)) is not None:
        to.heading("Why it is slow", None)
        to.text(sentence(diagnosis.finding()))
        _diagnosed(to, diagnosis)
    to.heading("Four lifecycles", None)
    gaps = "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    cards = run_charts.lifecycles(metrics, gaps, metrics.values(gaps), prefill, run_colour(run))
    for place, (name, card) in zip(to.beside(len(cards)), cards.items(), strict=True):
        with place:
            to.figure(card, name, name, trust_in_recording(recording), small=True)
    to.heading("Every metric", None)
    run_words.show_metrics(to, run, metrics)
    with to.fold("How this was run"):
        run_words.show_origin(to, run)
    return source.name


def _diagnosis_of(source: RecordedRun) -> DiagnosisDocument | None:
    """Return the diagnosis that is saved with the run or was made on the Run page; None if there is none."""
    path = source.recording.path.resolve()
    if (saved := path / DIAGNOSIS_FILE).exists():
        return DiagnosisDocument.read(read_json(saved))
    here = {"run": str(path), "stamp": stamp(path)}
    jobs = (job for job in finished(source.runs / "jobs", DIAGNOSIS) if here.items() <= job.settings.items())
    answer = next((job.result for job in jobs), None) or bundled_answer(sample_diagnosis(path).as_json())
    return None if answer is None else DiagnosisDocument.read(answer)


def _sweep(to: Sheet, source: Sweep) -> str:
    """Report the runs of a sweep: its view, and the same view of the main metrics."""
    results = source.results
    complete = results.complete
    to.text(results.summary, soft=True)
    if complete.num_rows and results.metrics:
        view, rated = source.view or sweep_charts.opening_view(results), sweep_charts.trust(complete)
        for name in dict.fromkeys((view.y, *sweep_charts.FIRST)):
            if name in results.metrics and name != view.x:
                plot = sweep_charts.drawn(results, complete, view._replace(y=name))
                said = sweep_charts.heading(results, view._replace(y=name))
                to.figure(plot, name, said, rated, sweep_charts.help_of(name))
    metrics = {name: title for name, title in results.metrics.items() if name in sweep_charts.FIRST}
    shown = complete.select([*results.parameters, *metrics, "trust"]).slice(0, _ROWS)
    to.heading("Runs", None)
    to.text(f"The first {_ROWS:,} of {complete.num_rows:,}." if complete.num_rows > _ROWS else "", soft=True)
    to.table(
        Table.from_rows([{metrics.get(name, name): value for name, value in row.items()} for row in shown.to_pylist()])
    )
    rows = results.runs.select(["status", *results.parameters, "error"]).to_pylist()
    if failed := [row for row in rows if row.pop("status") != "complete"]:
        to.heading("Runs that failed", None)
        to.table(Table.from_rows(failed[:_ROWS]))
    versions = [] if "version" not in results.runs.column_names else results.runs["version"].unique().to_pylist()
    varied = {results.paths[name]: results.values(name)[:_VALUES] for name in results.parameters}
    _again(to, ", ".join(filter(None, versions)), {"command": "tokentwin sweep FILE -o OUT"}, "Sweeps")
    with to.fold("Settings of all runs, and the values of varied settings"):
        to.settings({"base": dict(results.base), "varied": varied})
    name = source.path.resolve().name
    return name if name.lower().startswith("sweep") else f"Sweep {name}"


def _metrics(path: Path) -> RunMetrics:
    return RunMetrics.from_recording(Recording.load(path))


def _validation(to: Sheet, source: Validation) -> str:
    """Report a validation; a line says where a part of it is damaged."""
    report, external = source.report, newest_external(source.runs)
    to.badge(trust_in_report(report))
    to.text(trust_words.FLOOR, soft=True)
    to.text(trust_words.made_of(report), soft=True)
    if report.disturbed:
        to.warning(trust_words.disturbance(report))
    to.heading("The seven checks", None)
    to.text(LADDER, soft=True)
    climbed = rungs(report, external, newest_clients(source.runs), newest_decisions(source.runs))
    columns = tuple(map(Column, ("rung", "result", "detail")))
    to.table(Table(columns, [(rung.title, rung.headline.replace("**", ""), rung.detail) for rung in climbed]))
    latencies = trust_answer.compared_latencies(source.path, report, _metrics)
    trust_answer.show_runs(to, latencies, report, trust_answer.figures(latencies, report))
    trust_answer.show_steps(to, source.path, report)
    try:
        _maps(to, source)
    except UserError as error:
        to.warning(str(error))
    trust_answer.show_published(to, external, "blind")
    to.heading("How to reproduce it", None)
    to.text("This command calibrates, makes real runs, simulates them and compares:")
    to.code("tokentwin demo")
    if report.hardware:
        with to.fold("Where this was measured"):
            to.settings({name: str(value) for name, value in report.hardware.items()})
    return report.verdict


def _maps(to: Sheet, source: Validation) -> None:
    """Draw the maps of the measured shapes behind the report's simulated run."""
    if name := source.report.recordings.simulated:
        recording = Recording.load(resolve(source.path, name))
        if (timing := timed_by(recording, source.runs, source.report.calibration)) is None:
            to.heading(TITLE, None)
            to.text("There is no map, because the calibration of the simulated run was not found.", soft=True)
        else:
            show_maps(to, domain(recording, timing), recording.run, "this run")


def _again(
    to: Sheet, version: str, inputs: Mapping[str, Any], page: str, command: str = "", files: Mapping[str, str] = {}
) -> None:
    """Write the version and the command that was run. For an answer of `page`, write its inputs and any `command`.

    `files` are the files that the command reads: names and contents.
    """
    version = f"Made by tokentwin {version or 'of an unknown version'}"
    to.heading("How to reproduce it", None)
    if "command" in inputs:
        to.text(f"{version} with this command:")
        to.code(inputs["command"])
        return
    to.text(
        f"{version}, on the {page} page"
        f"{', with these inputs.' if not command else '. This command gives the same answer:'}"
    )
    if command:
        to.code(command)
    for name, text in {**files, **({"every input": dict(inputs)} if inputs else {})}.items():
        with to.fold(name):
            to.settings(text)


_REPORTS: dict[type, Callable[[Sheet, Any], str]] = {
    PlanDocument: _plan,
    MostClientsDocument: _most_clients,
    ComparisonDocument: _comparison,
    DiagnosisDocument: _diagnosis,
    RecordedRun: _run,
    Sweep: _sweep,
    Validation: _validation,
}
