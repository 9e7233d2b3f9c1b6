"""`tokentwin export`: a recorded run, or a saved answer, in another tool's format."""

from __future__ import annotations

from pathlib import Path

import click

from tokentwin.exports.formats import FORMATS


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "format", required=True, type=click.Choice(list(FORMATS)), help="Format.")
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--table", help="For parquet and csv, where there are several: requests or steps, rows or tallies.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export(source: Path, format: str, out: Path, table: str | None, force: bool) -> None:
    """Write SOURCE in another format.

    SOURCE is a recording of the real engine or the simulator, the directory of a sweep or of a validation report, or
    the answer that `plan --save` or `compare --save` kept.

    parquet and csv: its tables. html: a report in one file, with the figures of the dashboard. json: a plan or a
    comparison as it was saved. Of a recording also perfetto, a trace for ui.perfetto.dev, and openmetrics, what
    vLLM's /metrics would say at the end of the run, job="sim".
    """
    from tokentwin.exports.export import export as write
    from tokentwin.exports.exportable import open_exportable

    write(open_exportable(source), format, out, table, overwrite=force)
    click.echo(f"wrote {out} ({out.stat().st_size:,} bytes)")
