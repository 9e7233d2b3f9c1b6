"""`tokentwin explain`: where the time of one step goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from planning.deployments import read_deployment, refuse_engine_flags
from tokentwin.options import deployment_options

if TYPE_CHECKING:
    from rich.table import Table

    from calibration.steps.explanation import Explanation
    from calibration.steps.token_life import Stage

_COUNT = click.IntRange(min=0, max=10_000_000)


@click.command()
@click.option("--gpu", default="H100", help="GPU of `tokentwin gpus`, or a YAML file with one.")
@click.option(
    "--rows",
    default=64,
    type=_COUNT,
    help="Number of requests that decode; with speculative decoding each also has a draft.",
)
@click.option("--context", default=1024, type=_COUNT, help="Tokens before each decoded one.")
@click.option("--prompts", default=0, type=_COUNT, help="Number of prompt chunks.")
@click.option("--chunk", default=512, type=click.IntRange(2, 10_000_000), help="Tokens of a chunk.")
@click.option("--past", default=0, type=_COUNT, help="Tokens of the same prompt that were computed before each chunk.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@deployment_options
def explain(
    gpu: str,
    rows: int,
    context: int,
    prompts: int,
    chunk: int,
    past: int,
    style: str,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Show every operation of a step with its roofline, the parts of the predicted time, and what its tokens become.

    --model is the name of a known model (see `tokentwin model list`), a config.json or its folder.
    """
    from calibration.operations import uniform_step
    from calibration.steps.explanation import explain as explained
    from calibration.steps.predict import predicted_cost
    from calibration.steps.token_life import token_life
    from serving.deployments.config import Deployment
    from serving.errors import UserError

    if not rows and not prompts:
        raise UserError("rows", rows, "makes an empty step; give --rows or --prompts")
    refuse_engine_flags(flags)
    deployment = read_deployment(deployment_file, flags, Deployment(model="Llama-3.1-8B", device="cuda"))
    speculative = deployment.scheduler.speculative
    drafts = speculative.num_speculative_tokens if speculative else 0
    sizes = uniform_step(rows, context, prompts, chunk, past, drafts)
    cost = predicted_cost(gpu, deployment)
    found, life = explained(cost, sizes), token_life(cost.model, cost.deployment, sizes)
    if style == "json":
        click.echo(json.dumps(_as_dict(found) | {"token_life": [stage._asdict() for stage in life]}))
    else:
        decodes = f"{rows} rows{_with(drafts)} at {context:,}"
        _print(found, f"{deployment.model} on {gpu}, {decodes} and {prompts} x {chunk} prompt tokens")
        _print_life(life)


def _print_life(life: list[Stage]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the life of its tokens, on one device", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("stage", "shape", "type", "times", "MB"):
        table.add_column(heading, justify="right" if heading in ("times", "MB") else "left")
    for stage in life:
        shape = " x ".join(f"{size:,}" for size in stage.shape)
        table.add_row(stage.name, shape, stage.dtype, str(stage.times), _amount(stage.bytes / 1e6))
    Console().print(table)


def _as_dict(found: Explanation) -> dict[str, Any]:
    operations = [{**vars(o), "coverage": o.coverage.name.lower()} for o in found.operations]
    stages = [stage._asdict() for stage in found.stages]
    return {**vars(found), "operations": operations, "stages": stages, "coverage": found.coverage.name.lower()}


def _print(found: Explanation, title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from calibration.kernels.times import Coverage

    console = Console()
    operations = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operation", "times", "GFLOP", "MB", "µs", "roofline", "bound by", "±"):
        words = heading in ("operation", "bound by")
        operations.add_column(heading, justify="left" if words else "right", no_wrap=heading != "operation")
    for o in found.operations:
        operations.add_row(
            o.name,
            str(o.count),
            _amount(o.flops / 1e9),
            _amount(o.bytes / 1e6),
            _amount(o.ns / 1e3),
            f"{100 * o.utilisation:.0f} %",
            o.bound,
            f"{100 * o.sigma:.0f} %{'*' if o.coverage is Coverage.EXTRAPOLATED else ''}",
        )
    console.print(operations)
    if any(o.coverage is Coverage.EXTRAPOLATED for o in found.operations):
        console.print("* beyond measured shapes")
    parts = Table(title="the step, as engines run it", title_justify="left")
    for heading in ("part", "µs", "share"):
        parts.add_column(heading, justify="left" if heading == "part" else "right")
    for name, ns in sorted(found.parts_ns.items(), key=lambda item: -item[1]):
        parts.add_row(name, f"{ns / 1e3:,.1f}", f"{100 * ns / found.step_ns:.1f} %")
    parts.add_section()
    parts.add_row("step", f"{found.step_ns / 1e3:,.1f}", "")
    console.print(parts)
    if found.stages:
        console.print(_stages(found))
    hidden = "once a way through the pipeline" if found.stages else "which async scheduling hides"
    console.print(f"and {found.host_ns / 1e3:,.0f} µs on the CPU before it, {hidden}")
    console.print(f"{found.coverage.name.lower()}: because of {found.why}")


def _stages(found: Explanation) -> Table:
    """Stage by stage, neighbours that are alike together."""
    from itertools import groupby

    from rich.table import Table

    table = Table(title="on each pipeline stage", title_justify="left")
    for heading in ("stage", "layers", "µs"):
        table.add_column(heading, justify="right")
    first = 0
    for stage, alike in groupby(found.stages):
        last = first + len(list(alike)) - 1
        number = str(first) if first == last else f"{first} to {last}"
        table.add_row(number, str(stage.layers), f"{stage.ns / 1e3:,.1f}")
        first = last + 1
    table.add_section()
    transfers = found.step_ns - sum(stage.ns for stage in found.stages)
    table.add_row("transfers", "", f"{transfers / 1e3:,.1f}")
    return table


def _with(drafts: int) -> str:
    return f" with {drafts} draft tokens each" if drafts else ""


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
