"""`tokentwin diagnose`: the reasons why a recorded run is slow."""

from __future__ import annotations

from typing import Any

import click

from tokentwin.options import options_of, requested
from tokentwin.planning.diagnose.request import DiagnoseRequest
from tokentwin.saved_answer import AnswerOutput, answering

_LATENCIES = ("ttft", "itl", "tpot", "e2e")

options = options_of(DiagnoseRequest)


@click.command()
@click.argument("run", type=click.Path())
@options("--calibration --gpu --router --peak")
@click.option("--metric", type=click.Choice(_LATENCIES), help="Latency whose p99 the diagnosis explains.")
@click.option("--slo", help="Bounds in ms above which the p99 of a latency counts as high, e.g. 'ttft:200 tpot:50'.")
@answering
def diagnose(slo: str | None, metric: str | None, output: AnswerOutput, **given: Any) -> None:
    """Diagnose RUN, a recording of the real engine or the simulator: symptoms, evidence, and how to test them.

    With step times (-c or --gpu) the run is simulated again, each time without one constraint. This shows which
    constraint causes the high p99, whether capacity or policy is the problem, and which change helps most. Without
    step times the diagnosis shows only symptoms and evidence.

    If you save the diagnosis as RUN/diagnosis.json, the report of `tokentwin export RUN --to html` shows it.
    """
    from tokentwin.planning.diagnose import recorded_run
    from tokentwin.planning.progress import telling
    from tokentwin.serving.metrics import parse_slo

    given |= {"bounds": parse_slo(slo) if slo else None, "metric": f"{metric}_ms" if metric else None}
    request = requested(DiagnoseRequest, given)
    with telling() as tell:
        answer = recorded_run.diagnose(request, tell)
    output.finish(answer)
