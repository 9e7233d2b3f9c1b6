"""`tokentwin validate external`: rung 4, published measurements of other engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import Finite
from tokentwin.serving.answers.figures import NOTHING
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from tokentwin.calibration.validation.external.case import Case
    from tokentwin.calibration.validation.external.scoring import CaseResult
    from tokentwin.serving.errors import UserError

TARGET_MISSED = 3


@click.command()
@click.option("--data", default="../shared/data", type=click.Path(), help="Folder of measurements.")
@click.option("--cases", type=click.Path(), help="Folder of your own case files, instead of the published runs.")
@click.option("--case", "names", multiple=True, help="Use only the case with this name; can be repeated.")
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    type=click.Path(),
    help="Recording of `tokentwin bench --url`, instead of case files; several recordings give the noise floor.",
)
@click.option(
    "--deployment",
    "-d",
    "deployment_file",
    type=click.Path(),
    help="With --recording: deployment of the server, in YAML.",
)
@click.option("--gpu", help="With --recording: GPU that the server runs on.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 1000),
    help="With --recording: number of engines behind the router. [default: 1]",
)
@click.option("--router", help="With --recording: router of the server. [default: round-robin]")
@click.option(
    "--max-error",
    type=Finite(min=0),
    help="With --recording: target for the errors of means and rates, in percent; exit with 3 if one is larger.",
)
@click.option(
    "--leave-out",
    "levels",
    multiple=True,
    type=click.Choice(["gpu", "engine", "model", "source", "own-rows"]),
    help="Predict each measured run only from runs of other GPUs (engines, models, sources). own-rows: from other "
    "sources and a few runs of its own deployment. Can be repeated.",
)
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@click.option("--write", "page", type=click.Path(), help="Also write the report to this Markdown page.")
@click.option("--out", "-o", type=click.Path(), help="Also write external.json here, for the dashboard's Trust page.")
def external(
    data: str,
    cases: str | None,
    names: tuple[str, ...],
    recordings: tuple[str, ...],
    levels: tuple[str, ...],
    style: str,
    page: str | None,
    out: str | None,
    **server: Any,
) -> None:
    """Simulate measured runs of other engines with the same settings, and compare measured and predicted figures.

    A case file describes such runs: the engine's settings, its files in --data, and targets for the errors.

    With --recording you compare your own server with its twin, in two commands:

    \b
      tokentwin bench trace.csv --url http://localhost:8000 -o measured
      tokentwin validate external --recording measured -d deployment.yaml --gpu H100

    Latencies that a client measures include HTTP and tokenising. `tokentwin validate front-door` also simulates these.

    With --leave-out each GPU, engine, model or source is predicted only from the cases of the others, and the report
    states the errors. Runs that cannot be simulated are counted, with the reason.

    If a case file is wrong, the command prints one line about it and computes the errors of the other cases.

    Exit status: 0 if every target is met, 3 if one is missed, 2 if a file or a setting is wrong.
    """
    from tokentwin.calibration.validation.external.report import as_dict
    from tokentwin.planning.checkout import need_lab

    if page:
        need_lab("write", "use --format json")
    if levels:
        need_lab("leave-out")
    refused: dict[str, UserError] = {}
    if recordings:
        _refuse_cases(cases, names)
        folder, chosen = Path(), [_own(recordings, **server)]
    else:
        _refuse_server(server)
        folder, chosen = Path(data), chosen_cases(data, cases, names, refused)
    if levels:
        _print_left_out(chosen, folder, levels, style, page)
        return
    if not names:
        chosen = [case for case in chosen if not case.only_left_out]
    results = _scored(chosen, folder, refused)
    why = {name: str(error) for name, error in refused.items()}
    report = as_dict(results)
    report |= {"refused": why, "met": report["met"] and not why}
    if page:
        _write_page(page, results, why)
    if out:
        write_results(Path(out) / "external.json", report)
    if style == "json":
        click.echo(json.dumps(report))
    else:
        print_results(results)
    for name, reason in why.items():
        click.echo(f"tokentwin: {name} is not scored: {reason}", err=True)
    if refused:
        raise SystemExit(2)
    if not all(verdict.met for result in results for verdict in result.verdicts):
        raise SystemExit(TARGET_MISSED)


def _refuse_cases(cases: str | None, names: tuple[str, ...]) -> None:
    from tokentwin.serving.errors import UserError

    if cases or names:
        raise UserError("cases", cases or names[0], "cannot be combined with --recording; leave one of them out")


def _refuse_server(server: Mapping[str, Any]) -> None:
    """Raise UserError for an option that describes the user's own server."""
    from tokentwin.serving.errors import UserError

    for option, value in server.items():
        if value is not None:
            raise UserError(option.removesuffix("_file").replace("_", "-"), value, "needs --recording")


def _scored(cases: Sequence[Case], folder: Path, refused: dict[str, UserError]) -> list[CaseResult]:
    """Return the results of the cases. The error of a wrong case goes to `refused`, unless it is the only case."""
    from tokentwin.calibration.validation.external.predictor import blind
    from tokentwin.calibration.validation.external.scoring import score
    from tokentwin.calibration.validation.external.steps import score_steps
    from tokentwin.serving.errors import UserError

    results = []
    for at, case in enumerate(cases, start=1):
        click.echo(f"{at} of {len(cases)}: {case.title}", err=True)
        try:
            results.append(score_steps(case, folder) if case.is_of_steps else score(case, folder, blind))
        except UserError as error:
            if len(cases) == 1:
                raise
            refused[case.name] = error
    return results


def _written(page: str) -> str:
    return Path(page).read_text(encoding="utf-8") if Path(page).is_file() else ""


def _write_page(page: str, results: Sequence[CaseResult], why: Mapping[str, str]) -> None:
    from lab.external.page import markdown, section_of

    not_scored = "".join(f"- *{name}*: {reason}\n" for name, reason in why.items())
    text = markdown(results) + (not_scored and f"\n## Not scored\n\n{not_scored}")
    write_text("write", Path(page), text + section_of(_written(page)))


def _print_left_out(cases: Sequence[Case], data: Path, levels: tuple[str, ...], style: str, page: str | None) -> None:
    from lab.external.leave_out import HEADER
    from lab.external.page import LEFT_OUT_TITLES, left_out_section, with_section
    from lab.external.teaching import left_out_tables

    tables = left_out_tables(cases, data, levels, lambda said: click.echo(said, err=True))
    if page:
        write_text("write", Path(page), with_section(_written(page), left_out_section(tables)))
    if style == "json":
        by_level = {level: [dict(zip(HEADER, row, strict=True)) for row in rows] for level, rows in tables.items()}
        click.echo(json.dumps(by_level))
        return
    for level, rows in tables.items():
        print_table(HEADER, rows, LEFT_OUT_TITLES[level])


def chosen_cases(data: str, cases: str | None, names: tuple[str, ...], refused: dict[str, UserError]) -> list[Case]:
    """Return the cases of `names`, or all cases. If all are read, the error of a wrong file goes to `refused`."""
    from tokentwin.calibration.validation.external.case import load_cases
    from tokentwin.planning.checkout import lab_is_here, need_lab
    from tokentwin.serving.errors import UserError

    if cases is None:
        need_lab("cases", "give --cases DIR, a folder of your own case files")
        from lab.external.cases import FOLDER as folder
    else:
        folder = Path(cases)
    lab_is_here()  # makes `lab` importable, because a user's own case may name formats in it
    if not Path(data).is_dir():
        raise UserError("data", data, "is not a folder; give --data DIR, the folder of the measured runs")
    wrong: dict[str, UserError] = {}
    chosen = load_cases(folder, wrong)
    known = [case.name for case in chosen]
    if wrong and (not chosen or set(names) - set(known)):
        raise next(iter(wrong.values()))
    if not names:
        refused.update(wrong)
    for name in names:
        if name not in known:
            remedy = f"is not a known case; choose one of {', '.join(known)}"
            raise UserError("case", name, remedy)
    return [case for case in chosen if (case.name in names if names else not case.only_named)]


def _own(
    recordings: tuple[str, ...],
    deployment_file: str | None,
    gpu: str | None,
    replicas: int | None,
    router: str | None,
    max_error: float | None,
) -> Case:
    from tokentwin.calibration.validation.external.case import case_of_recordings
    from tokentwin.serving.deployments.config import load_deployment
    from tokentwin.serving.errors import UserError

    if gpu is None:
        raise UserError("gpu", None, "is missing; name the GPU that the server runs on, as `tokentwin gpus` does")
    deployment = load_deployment(deployment_file) if deployment_file else None
    folders = [Path(recording) for recording in recordings]
    return case_of_recordings(folders, deployment, gpu, replicas or 1, router or "round-robin", max_error)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results for the dashboard, with the time and the version that made them."""
    from tokentwin import __version__

    about = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}
    write_text("out", path, json.dumps({**about, **results}) + "\n")


def write_text(option: str, path: Path, text: str) -> None:
    """Write `text`, and make the folders of `path`. Raises UserError about `option` if that cannot be done."""
    from tokentwin.serving.errors import UserError, reason

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(path), f"cannot be written: {reason(error)}") from None


def print_results(results: list[CaseResult]) -> None:
    """Print a table for every case, with long tables summarised by group, and then the targets."""
    from tokentwin.calibration.validation.external.report import (
        LEVEL_HEADER,
        MANY,
        ROW_HEADER,
        TARGET_HEADER,
        group_header,
        group_rows,
        level_rows,
        row_cells,
        target_row,
    )

    for result in results:
        long = len(result.runs) > MANY
        header = group_header(result) if long else ROW_HEADER
        rows = list(group_rows(result) if long else map(row_cells, result.rows))
        filled = [any(cells[at] not in ("", NOTHING) for cells in rows) for at in range(len(header))]
        shown = (tuple(compress(cells, filled)) for cells in rows)
        print_table(tuple(compress(header, filled)), shown, result.case.title)
        print(f"{result.trust.level}: {result.trust.reason}")
    if len(results) > 1:
        print_table(LEVEL_HEADER, level_rows(results), "errors by the stated trust in predictions")
    targets = [target_row((result, verdict)) for result in results for verdict in result.verdicts]
    if targets:
        print_table(TARGET_HEADER, ([cell.replace("**", "") for cell in cells] for cells in targets), "targets")
