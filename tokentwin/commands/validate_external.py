"""`tokentwin validate external`: rung 4, published measurements of engines nobody here wrote."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from calibration.validation.external.predictor import Predictor
    from calibration.validation.external.scoring import CaseResult

TARGET_MISSED = 3


@click.command()
@click.option("--data", default="../shared/data", show_default=True, type=click.Path(), help="Folder of measurements.")
@click.option("--cases", type=click.Path(), help="Folder of your own case files, instead of the bundled ones.")
@click.option("--case", "names", multiple=True, help="Use only the case of this name; can be repeated.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--write", "page", type=click.Path(), help="Also write the report to this Markdown page.")
@click.option("--out", "-o", type=click.Path(), help="Also write external.json here, for the dashboard's Trust page.")
def external(
    data: str, cases: str | None, names: tuple[str, ...], style: str, page: str | None, out: str | None
) -> None:
    """Simulate measured runs of other engines with their own settings, and compare the figures.

    A case file names the engine's settings, its files in --data, and how close the prediction should be.

    Exit status: 0 if every target is met, 3 if one is missed, 2 if a file or a setting is wrong.
    """
    from calibration.validation.external.case import load_cases
    from calibration.validation.external.page import as_dict, markdown
    from calibration.validation.external.scoring import score
    from calibration.validation.external.steps import score_steps
    from serving.errors import UserError
    from tokentwin import __version__

    folder = Path(data)
    if not folder.is_dir():
        raise UserError("data", data, "is not a folder; give --data DIR, the folder of the measured runs")
    chosen = load_cases(Path(cases) if cases else None)
    for name in names:
        if name not in [case.name for case in chosen]:
            remedy = f"is not a known case; choose one of {', '.join(case.name for case in chosen)}"
            raise UserError("case", name, remedy)
    if names:
        chosen = [case for case in chosen if case.name in names]
    results = []
    for at, case in enumerate(chosen, start=1):
        click.echo(f"{at} of {len(chosen)}: {case.title}", err=True)
        results.append(score_steps(case, folder) if case.is_of_steps else score(case, folder, _predictor()))
    if page:
        _write("write", Path(page), markdown(results))
    if out:
        created = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}
        _write("out", Path(out) / "external.json", json.dumps({**created, **as_dict(results)}) + "\n")
    if style == "json":
        click.echo(json.dumps(as_dict(results)))
    else:
        print_results(results)
    if not all(verdict.met for result in results for verdict in result.verdicts):
        raise SystemExit(TARGET_MISSED)


def _predictor() -> Predictor:
    from calibration.validation.external.predictor import blind

    return blind


def _write(option: str, path: Path, text: str) -> None:
    from serving.errors import UserError, reason

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(path), f"cannot be written: {reason(error)}") from None


def print_results(results: list[CaseResult]) -> None:
    """Every case as a table, long ones summed up by group; the targets last."""
    from rich.console import Console
    from rich.table import Table

    from calibration.validation.external.page import (
        MANY,
        ROW_HEADER,
        TARGET_HEADER,
        group_header,
        group_rows,
        row_cells,
        target_row,
    )

    console = Console()
    for result in results:
        long = len(result.runs) > MANY
        header = group_header(result) if long else ROW_HEADER
        table = Table(*header, title=result.case.title, title_justify="left")
        for cells in group_rows(result) if long else map(row_cells, result.rows):
            table.add_row(*cells)
        console.print(table)
        coverage, why = result.provenance
        console.print(f"{coverage.name.lower()}: {why}", highlight=False)
    targets = Table(*TARGET_HEADER, title="targets", title_justify="left")
    for result in results:
        for verdict in result.verdicts:
            targets.add_row(*(cell.replace("**", "") for cell in target_row((result, verdict))))
    console.print(targets)
