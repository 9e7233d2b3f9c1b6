"""`tokentwin diagnose`: why a recorded run is as slow as it is."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from calibration.diagnosis import Diagnosis

_JUDGED = {"ttft": "ttft_ms", "itl": "itl_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}


@click.command()
@click.argument("run", type=click.Path())
@click.option("--calibration", "-c", type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--gpu", help="Time steps by the kernel tables of this GPU.")
@click.option("--router", default="", help="Another router than the recording says.")
@click.option("--metric", "judged", type=click.Choice(list(_JUDGED)), help="Explain the p99 of this one.")
@click.option("--slo", help="Bounds in ms that say what is high, e.g. 'ttft:200 tpot:50'.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
def diagnose(
    run: str, calibration: str | None, gpu: str | None, router: str, judged: str | None, slo: str | None, style: str
) -> None:
    """Diagnose RUN, a recording of the real engine or the simulator: symptoms, evidence, and what would prove them.

    With a cost model (-c or --gpu) the run is simulated again with one constraint lifted at a time, and its p99 is
    attributed to them: a capacity problem, or a policy problem. Without one only evidence is given.
    """
    from tokentwin.diagnosing import diagnosed, diagnosis_document

    evidence, found = diagnosed(run, calibration, gpu, router, _JUDGED.get(judged or ""), slo or "")
    if style == "json":
        click.echo(json.dumps(diagnosis_document(evidence, found)))
    else:
        print_diagnosis(found, evidence.has_steps)


def print_diagnosis(found: Diagnosis, has_steps: bool) -> None:
    """Symptoms with their evidence, counterfactuals, and the verdict last."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if found.symptoms:
        table = Table("symptom", "lifecycle", show_lines=True)
        for heading in ("evidence", "what would prove it"):
            table.add_column(heading, overflow="fold")
        for symptom in found.symptoms:
            table.add_row(symptom.name, symptom.lifecycle, symptom.evidence, symptom.proof)
        console.print(table)
    if not has_steps:
        console.print("[dim]the recording holds no steps, so that compute and memory were not looked at[/]")
    if found.counterfactuals:
        _print_counterfactuals(console, found)
    else:
        console.print("[dim]evidence only: with -c or --gpu the run is simulated without each constraint[/]")
    console.print(f"[bold]{found.verdict()}[/]", soft_wrap=True)


def _print_counterfactuals(console: Console, found: Diagnosis) -> None:
    from rich.table import Table

    from calibration.baseline import FINISHED
    from serving.metrics import metric

    sheds = found.metric == FINISHED
    of = "; latencies are those of the requests that finish" if sheds else ""
    columns = [
        "with",
        "kind",
        *(["finish"] if sheds else []),
        *(f"{metric(name).label} p99, ms" for name in found.simulated),
    ]
    table = Table(*columns, title=f"what lifting one constraint would buy{of}", title_justify="left")
    table.add_row(
        "the run as it was", "", *_shares(found.finished[1], sheds), *(_ms(p99) for p99 in found.simulated.values())
    )
    for c in found.counterfactuals:
        if not c.skipped:
            cells = (f"{_ms(c.p99[name])} ({_percent(-c.bought[name])})" for name in found.simulated)
            table.add_row(c.name, c.kind, *_shares(c.finished, sheds), *cells)
    console.print(table)
    for c in found.counterfactuals:
        if c.skipped:
            console.print(f"[dim]{c.name}: not tried, {c.skipped}[/]")
    if found.warning:
        console.print(f"[yellow]{found.warning}[/]", soft_wrap=True)


def _shares(finished: float, shown: bool) -> list[str]:
    from calibration.step_marks import shown_share

    return [shown_share(finished)] if shown else []


def _ms(value: float) -> str:
    from calibration.symptoms import shown_ms

    if math.isnan(value):
        return "-"
    return shown_ms(value) if math.isfinite(value) else "never"


def _percent(share: float) -> str:
    return f"{round(100 * share):+d} %" if math.isfinite(share) else "-"
