"""`tokentwin columns`: what the columns of a dataset mean."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--dataset", help="Show only this dataset, e.g. steps.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
def columns(path: Path | None, dataset: str | None, style: str) -> None:
    """Explain every column: its name, unit and definition.

    PATH is a recording, a sweep or a Parquet file. Without PATH you see the columns of every recording.
    """
    from rich.console import Console
    from rich.table import Table

    from serving.errors import UserError
    from traces.column_dictionary import columns_at, columns_text, recording_columns

    found = recording_columns() if path is None else columns_at(path)
    if dataset is not None:
        if dataset not in found:
            raise UserError("dataset", dataset, f"does not exist; choose {', '.join(found)}")
        found = {dataset: found[dataset]}
    if style == "json":
        click.echo(columns_text(found), nl=False)
        return
    for name, entries in found.items():
        table = Table("column", "unit", "definition", title=name, title_justify="left", box=None, header_style="bold")
        for entry in entries:
            table.add_row(entry["name"], entry["unit"], entry["definition"])
        Console().print(table)
        click.echo()
