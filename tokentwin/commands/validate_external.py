"""`tokentwin validate external`: rung 4, published measurements of engines nobody here wrote."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from calibration.validation.external.predictor import Predictor
    from calibration.validation.external.scoring import Outcome

TARGET_MISSED = 3


@click.command()
@click.option("--data", default="../shared/data", show_default=True, type=click.Path(), help="Folder of measurements.")
@click.option("--cases", type=click.Path(), help="Folder of your own case files, instead of the bundled ones.")
@click.option("--case", "names", multiple=True, help="Use only the case of this name; repeat for more.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--write", "page", type=click.Path(), help="Also write the report as a Markdown page.")
@click.option("--out", "-o", type=click.Path(), help="Also write external.json here, for the dashboard's Trust page.")
def external(
    data: str, cases: str | None, names: tuple[str, ...], style: str, page: str | None, out: str | None
) -> None:
    """Simulate measured runs of other engines with their own settings, and set the figures side by side.

    A case file names the engine's settings, the files in --data, and how close a prediction should come. Exits 0 when
    every target is met, 3 when one is missed, 2 when a file or a setting is wrong.
    """
    from calibration.validation.external.case import load_cases
    from calibration.validation.external.page import as_dict, markdown
    from calibration.validation.external.scoring import score
    from calibration.validation.external.steps import score_steps
    from serving.errors import UserError
    from tokentwin import __version__

    folder = Path(data)
    if not folder.is_dir():
        raise UserError("data", data, "is no folder; give --data DIR, where the measured runs lie")
    chosen = load_cases(Path(cases) if cases else None)
    for name in names:
        if name not in [case.name for case in chosen]:
            raise UserError("case", name, f"is none of {', '.join(case.name for case in chosen)}")
    if names:
        chosen = [case for case in chosen if case.name in names]
    outcomes = []
    for at, case in enumerate(chosen, start=1):
        click.echo(f"{at} of {len(chosen)}: {case.title}", err=True)
        outcomes.append(score_steps(case, folder) if case.is_of_steps else score(case, folder, _predictor()))
    if page:
        _write("write", Path(page), markdown(outcomes))
    if out:
        created = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "version": __version__}
        _write("out", Path(out) / "external.json", json.dumps({**created, **as_dict(outcomes)}) + "\n")
    if style == "json":
        click.echo(json.dumps(as_dict(outcomes)))
    else:
        print_outcomes(outcomes)
    if not all(verdict.met for outcome in outcomes for verdict in outcome.verdicts):
        raise SystemExit(TARGET_MISSED)


def _predictor() -> Predictor:
    from calibration.validation.external.blind import blind

    return blind


def _write(option: str, path: Path, text: str) -> None:
    from serving.errors import UserError, reason

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(option, str(path), f"cannot be written: {reason(error)}") from None


def print_outcomes(outcomes: list[Outcome]) -> None:
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
    for outcome in outcomes:
        long = len(outcome.runs) > MANY
        header = group_header(outcome) if long else ROW_HEADER
        table = Table(*header, title=outcome.case.title, title_justify="left")
        for cells in group_rows(outcome) if long else map(row_cells, outcome.rows):
            table.add_row(*cells)
        console.print(table)
        mark, why = outcome.provenance
        console.print(f"{mark.name.lower()}: {why}", highlight=False)
    targets = Table(*TARGET_HEADER, title="targets", title_justify="left")
    for outcome in outcomes:
        for verdict in outcome.verdicts:
            targets.add_row(*(cell.replace("**", "") for cell in target_row((outcome, verdict))))
    console.print(targets)
