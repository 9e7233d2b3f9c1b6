"""`tokentwin columns`: the meaning of the columns of a dataset."""

from __future__ import annotations

from pathlib import Path

import click

from tokentwin.tables import print_table


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--dataset", help="Print only the columns of this dataset, e.g. steps.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
def columns(path: Path | None, dataset: str | None, style: str) -> None:
    """Print the name, unit and definition of every column.

    PATH is a recording, a sweep or a Parquet file. Without PATH the command prints the columns of all recordings.
    """
    from tokentwin.serving.errors import UserError
    from tokentwin.traces.schema import columns_at, columns_text, recording_columns

    datasets = recording_columns() if path is None else columns_at(path)
    if dataset is not None:
        if dataset not in datasets:
            raise UserError("dataset", dataset, f"does not exist; choose {', '.join(datasets)}")
        datasets = {dataset: datasets[dataset]}
    if style == "json":
        click.echo(columns_text(datasets), nl=False)
        return
    for name, entries in datasets.items():
        rows = ((entry["name"], entry["unit"], entry["definition"]) for entry in entries)
        print_table(("column", "unit", "definition"), rows, name)
        click.echo()
