"""`tokentwin export`: a recorded run, or a saved answer, in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from tokentwin.planning.exports.formats import FORMATS

if TYPE_CHECKING:
    from tokentwin.planning.exports.exportable import Exportable


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "format", required=True, type=click.Choice(list(FORMATS)), help="Format to write.")
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--table",
    help="With parquet or csv: name of the table to write, e.g. requests or steps; by default the main table.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def export(source: Path, format: str, out: Path, table: str | None, force: bool) -> None:
    """Write SOURCE in another format.

    SOURCE is a recording, the directory of a sweep or of a validation report, or an answer that was saved by `plan
    --save`, `compare --save` or `diagnose --save`.

    Formats parquet and csv write one table of SOURCE. Format html writes a report in one file, with the charts of the
    dashboard. Format json copies a saved answer. For a recording, format perfetto writes a trace for
    ui.perfetto.dev, and format openmetrics writes the metrics that vLLM's /metrics would show at the end of the run,
    with job="sim".
    """
    from tokentwin.planning.exports.export import export as write
    from tokentwin.planning.exports.exportable import open_exportable

    write(open_exportable(source), format, out, table, overwrite=force, html=_report)
    click.echo(f"wrote {out} ({out.stat().st_size:,} bytes)")


def _report(source: Exportable, out: IO[bytes]) -> None:
    """Write the report, for which the dashboard's figures and packages are needed."""
    from tokentwin.serving.errors import UserError

    try:
        from tokentwin.dashboard.html_reports.report import write_report
    except ModuleNotFoundError as error:
        remedy = "is not installed, and this format needs it; pip install 'tokentwin[dashboard]'"
        raise UserError("export", str(error.name), remedy) from None
    write_report(source, out)
