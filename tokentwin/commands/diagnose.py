"""`tokentwin diagnose`: why a recorded run is as slow as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from planning.diagnose.request import DiagnoseRequest
from tokentwin.options import options_of, requested

_LATENCIES = ("ttft", "itl", "tpot", "e2e")

option = options_of(DiagnoseRequest)


@click.command()
@click.argument("run", type=click.Path())
@option("--calibration", "-c", type=click.Path())
@option("--gpu")
@option("--router")
@option("--peak")
@click.option("--metric", type=click.Choice(_LATENCIES), help="Latency to explain at its p99.")
@click.option("--slo", help="Bounds in ms above which a latency counts as high, e.g. 'ttft:200 tpot:50'.")
@click.option("--save", type=click.Path(path_type=Path), help="Save the whole answer to this JSON file.")
@click.option("--force", is_flag=True, help="Replace the file of --save if it exists.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
def diagnose(slo: str | None, metric: str | None, save: Path | None, force: bool, style: str, **given: Any) -> None:
    """Diagnose RUN, a recording of the real engine or the simulator: symptoms, evidence, and how to test them.

    With a cost model (-c or --gpu) the run is simulated again, each time with one constraint lifted. This shows which
    constraint causes its p99, whether it is a problem of capacity or of policy, and which change buys most. Without a
    cost model you only get the evidence.

    If you save the diagnosis as RUN/diagnosis.json, the report of `tokentwin export RUN --to html` shows it.
    """
    from planning.diagnose import recorded_run
    from serving.whole_file import check_free
    from tokentwin.commands.saved_answer import finish
    from traces.slo import parse_slo

    if save is not None:
        check_free(save, force)
    given |= {"bounds": parse_slo(slo) if slo else None, "metric": f"{metric}_ms" if metric else None}
    finish(recorded_run.diagnose(requested(DiagnoseRequest, given)), style, save, force)
