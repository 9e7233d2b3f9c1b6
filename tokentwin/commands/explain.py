"""`tokentwin explain`: the operations of one step and their times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from planning.deployments import read_deployment, refuse_engine_flags
from serving.figures import shown_number, shown_share
from tokentwin.options import deployment_options
from tokentwin.tables import print_table

if TYPE_CHECKING:
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
@click.option(
    "--calibration",
    "-c",
    type=click.Path(),
    help="Directory that `tokentwin calibrate` wrote. Of our own engine only its launches are used.",
)
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@deployment_options
def explain(gpu: str, calibration: str | None, style: str, deployment_file: str | None, **given: Any) -> None:
    """Show every operation of a step with its roofline, the parts of the predicted time, and its tokens as tensors.

    --model is the name of a known model (see `tokentwin model list`), a config.json or its folder.
    """
    from calibration.operations import uniform_step
    from calibration.steps.explanation import explain as explained
    from calibration.steps.external_calibration import ExternalCalibration
    from calibration.steps.predict import predicted_cost
    from calibration.steps.token_life import token_life
    from planning.costs import calibration_in
    from serving.deployments.config import Deployment
    from serving.deployments.engine_defaults import defaults_taken, with_engine_defaults
    from serving.deployments.gpu_spec import find_gpu
    from serving.errors import UserError

    rows, context, prompts, chunk, past = (given.pop(name) for name in ("rows", "context", "prompts", "chunk", "past"))
    if not rows and not prompts:
        raise UserError("rows", rows, "makes an empty step; give --rows or --prompts")
    refuse_engine_flags(given)
    stated = read_deployment(deployment_file, given, Deployment(model="Llama-3.1-8B", device="cuda"))
    spec = find_gpu(gpu)
    deployment, defaults = with_engine_defaults(stated, spec), defaults_taken(stated, spec)
    speculative = deployment.scheduler.speculative
    drafts = speculative.num_speculative_tokens if speculative else 0
    sizes = uniform_step(rows, context, prompts, chunk, past, drafts)
    learnt = None if calibration is None else calibration_in(calibration)
    if learnt is None or isinstance(learnt, ExternalCalibration):
        cost = predicted_cost(gpu, deployment, learnt)
    else:
        cost = predicted_cost(gpu, deployment, launches=learnt.launches)
    found, life = explained(cost, sizes), token_life(cost.model, cost.deployment, sizes)
    if style == "json":
        more = {"token_life": [stage._asdict() for stage in life], "defaults": defaults}
        click.echo(json.dumps(_as_dict(found) | more))
    else:
        decodes = f"{rows} rows{_with(drafts)} at {context:,}"
        _print(found, f"{deployment.model} on {gpu}, {decodes} and {prompts} x {chunk} prompt tokens")
        _print_life(life)
        if defaults:
            click.echo(defaults)


def _print_life(life: list[Stage]) -> None:
    from rich.box import SIMPLE_HEAD

    rows = (
        (at.name, " x ".join(f"{n:,}" for n in at.shape), at.dtype, str(at.times), shown_number(at.bytes / 1e6))
        for at in life
    )
    headings = ("stage", "shape", "type", "times", "MB")
    print_table(headings, rows, "the life of its tokens, on one device", right=("times", "MB"), box=SIMPLE_HEAD)


def _as_dict(found: Explanation) -> dict[str, Any]:
    operations = [{**vars(o), "coverage": o.coverage.name.lower()} for o in found.operations]
    stages = [stage._asdict() for stage in found.stages]
    return {**vars(found), "operations": operations, "stages": stages, "coverage": found.coverage.name.lower()}


def _print(found: Explanation, title: str) -> None:
    from rich.box import SIMPLE_HEAD

    from calibration.kernels.times import Coverage

    operations = [
        (
            o.name,
            str(o.count),
            shown_number(o.flops / 1e9),
            shown_number(o.bytes / 1e6),
            shown_number(o.ns / 1e3),
            shown_share(o.utilisation),
            o.bound,
            shown_share(o.sigma) + "*" * (o.coverage is Coverage.EXTRAPOLATED),
        )
        for o in found.operations
    ]
    operations.append(("sum", "", "", "", shown_number(sum(found.kernels_ns.values()) / 1e3), "", "", ""))
    numbers = ("times", "GFLOP", "MB", "µs", "roofline", "±")
    headings = ("operation", *numbers[:-1], "bound by", "±")
    print_table(headings, operations, title, right=numbers, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if any(o.coverage is Coverage.EXTRAPOLATED for o in found.operations):
        print("* beyond measured shapes")
    _print_parts(found)
    if found.stages:
        of_stages = ("stage", "layers", "µs")
        print_table(of_stages, _stages(found), "on each pipeline stage", right=of_stages)
    hidden = "once a way through the pipeline" if found.stages else "which async scheduling hides"
    print(f"and {_us(found.host_ns)} µs on the CPU before it, {hidden}")
    if found.launches:
        print(f"{found.launches} kernels launched in {_us(found.launch_ns)} µs each ({found.launch_source})")
    print(f"{found.coverage.name.lower()}: because of {found.why}")


def _print_parts(found: Explanation) -> None:
    """Print each part as the sum of its kernels above, and as engines run it, longest first."""
    names = sorted({**found.parts_ns, **found.kernels_ns}, key=lambda name: -found.parts_ns.get(name, 0.0))
    parts = [
        (
            name,
            _us(found.kernels_ns.get(name)),
            _us(ns := found.parts_ns.get(name, 0.0)),
            shown_share(ns / found.step_ns, 1),
        )
        for name in names
    ]
    parts.append(("step", _us(sum(found.kernels_ns.values())), _us(found.step_ns), ""))
    headings = ("part", "kernels alone µs", "in the step µs", "share")
    print_table(headings, parts, "the same kernels in an engine's step, as measured steps teach it", right=headings[1:])


def _us(ns: float | None) -> str:
    return "" if ns is None else shown_number(ns / 1e3)


def _stages(found: Explanation) -> Iterator[tuple[str, str, str]]:
    """Yield the stages, with alike neighbours together; the transfers come last."""
    first = 0
    for stage, alike in groupby(found.stages):
        last = first + len(list(alike)) - 1
        number = str(first) if first == last else f"{first} to {last}"
        yield number, str(stage.layers), _us(stage.ns)
        first = last + 1
    yield "transfers", "", _us(found.step_ns - sum(stage.ns for stage in found.stages))


def _with(drafts: int) -> str:
    return f" with {drafts} draft tokens each" if drafts else ""
