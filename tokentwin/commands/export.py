"""`tokentwin export`: a recorded run in another tool's format."""

from __future__ import annotations

from pathlib import Path

import click

from tokentwin.exports.formats import FORMATS, TABLES


@click.command()
@click.argument("run", type=click.Path())
@click.option("--to", "format", required=True, type=click.Choice(list(FORMATS)), help="Format.")
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--table", type=click.Choice(TABLES), help="For parquet and csv; requests unless told otherwise.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export(run: str, format: str, out: Path, table: str | None, force: bool) -> None:
    """Write RUN, a recording of the real engine or the simulator, in another format.

    parquet and csv: requests or steps with their metrics. html: a report in one file. perfetto: a trace for
    ui.perfetto.dev. openmetrics: what vLLM's /metrics would say at the end of the run, job="sim".
    """
    from serving.errors import UserError
    from tokentwin.exports.formats import export as write
    from traces.recording import Recording

    recording = Recording.load(run)
    if table == "steps" and not sum(recording.group_rows("steps")):
        raise UserError("table", table, "holds no steps; simulate without --summary-only")
    write(recording, format, out, table, overwrite=force)
    click.echo(f"wrote {out} ({out.stat().st_size:,} bytes)")
