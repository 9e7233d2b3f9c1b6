"""`tokentwin diagnose`: why a recorded run is as slow as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from planning.diagnose.request import DiagnoseRequest
from tokentwin.request_options import options_of, requested

_LATENCIES = ("ttft", "itl", "tpot", "e2e")

option = options_of(DiagnoseRequest)


@click.command()
@click.argument("run", type=click.Path())
@option("--calibration", "-c", type=click.Path())
@option("--gpu")
@option("--router")
@click.option("--metric", type=click.Choice(_LATENCIES), help="Explain the p99 of this latency.")
@click.option("--slo", help="Latencies above these bounds in ms count as high, e.g. 'ttft:200 tpot:50'.")
@click.option("--save", type=click.Path(path_type=Path), help="Save the whole answer in this file, as JSON.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
def diagnose(slo: str | None, metric: str | None, save: Path | None, force: bool, style: str, **given: Any) -> None:
    """Diagnose RUN, a recording of the real engine or the simulator: symptoms, evidence, and what would prove them.

    With a cost model (-c or --gpu) the run is simulated again with one constraint lifted at a time, and its p99 is
    attributed to them: a capacity problem, or a policy problem. Without one only evidence is given.

    Save the diagnosis as RUN/diagnosis.json and the report that `tokentwin export RUN --to html` writes shows it.
    """
    from planning.diagnose import recorded_run
    from planning.exports.file import check_free, write_whole
    from serving.document import print_document
    from tokentwin.commands.command_line import command_line
    from traces.run_metrics import parse_slo

    if save is not None:
        check_free(save, force)
    given |= {"bounds": parse_slo(slo) if slo else None, "metric": f"{metric}_ms" if metric else None}
    command = command_line(click.get_current_context(), leave_out=("style", "save", "force"))
    document = recorded_run.diagnose(requested(DiagnoseRequest, given), asked={"command": command})
    if save is not None:
        write_whole(save, lambda file: file.write(document.dumps().encode()), force)
    if style == "json":
        click.echo(document.dumps())
    else:
        print_document(document)
