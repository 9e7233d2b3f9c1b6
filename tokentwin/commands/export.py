"""`tokentwin export`: a recorded run, or a saved answer, in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from planning.exports.formats import FORMATS

if TYPE_CHECKING:
    from planning.exports.exportable import Exportable


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "format", required=True, type=click.Choice(list(FORMATS)), help="Format to write.")
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--table", help="Table to write as parquet or csv, where there are several, e.g. requests, steps, rows, tallies."
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export(source: Path, format: str, out: Path, table: str | None, force: bool) -> None:
    """Write SOURCE in another format.

    SOURCE is a recording of the real engine or the simulator, the directory of a sweep or of a validation report, or
    the answer that `plan --save`, `compare --save` or `diagnose --save` kept.

    parquet and csv: its tables. html: a report in one file, with the figures of the dashboard. json: an answer as it
    was saved. Of a recording also perfetto, a trace for ui.perfetto.dev, and openmetrics, what
    vLLM's /metrics would say at the end of the run, job="sim".
    """
    from planning.exports.export import export as write
    from planning.exports.exportable import open_exportable

    write(open_exportable(source), format, out, table, overwrite=force, html=_report)
    click.echo(f"wrote {out} ({out.stat().st_size:,} bytes)")


def _report(source: Exportable, out: IO[bytes]) -> None:
    """The dashboard's, whose figures and packages it needs."""
    from serving.errors import UserError

    try:
        from dashboard.html_reports.report import write_report
    except ModuleNotFoundError as error:
        remedy = "is needed for this format and not installed; pip install 'tokentwin[dashboard]'"
        raise UserError("export", str(error.name), remedy) from None
    write_report(source, out)
