"""`tokentwin explain`: the operations of one step and their times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import deployment_options
from tokentwin.planning.deployments import read_deployment, refuse_engine_flags
from tokentwin.serving.answers.figures import shown_number, shown_share
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from tokentwin.calibration.steps.explanation import Explanation, Stage

_COUNT = click.IntRange(min=0, max=10_000_000)


@click.command()
@click.option("--gpu", default="H100", help="Name of a GPU (see `tokentwin gpus`), or a YAML file that describes one.")
@click.option(
    "--rows",
    default=64,
    type=_COUNT,
    help="Number of requests that decode; with speculative decoding each of them also verifies draft tokens.",
)
@click.option("--context", default=1024, type=_COUNT, help="Context of each decoding request, in tokens.")
@click.option("--prompts", default=0, type=_COUNT, help="Number of prompt chunks.")
@click.option(
    "--chunk", default=512, type=click.IntRange(2, 10_000_000), help="Length of each prompt chunk, in tokens."
)
@click.option(
    "--past", default=0, type=_COUNT, help="Tokens of each chunk's prompt that were computed in earlier steps."
)
@click.option(
    "--calibration",
    "-c",
    type=click.Path(),
    help="Directory that `tokentwin calibrate` wrote. A calibration of our own engine only gives launch times.",
)
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@deployment_options
def explain(gpu: str, calibration: str | None, style: str, deployment_file: str | None, **given: Any) -> None:
    """Show the operations of one step with their rooflines, the predicted time by part, and the tensors of its tokens.

    --model is the name of a known model (see `tokentwin model list`), a config.json or its folder.
    """
    from tokentwin.calibration.operations import uniform_step
    from tokentwin.calibration.steps.explanation import explain as explained
    from tokentwin.calibration.steps.explanation import token_life
    from tokentwin.calibration.steps.external_calibration import predicted_cost
    from tokentwin.calibration.steps.step_cost import Calibration
    from tokentwin.planning.resolution import calibration_in
    from tokentwin.serving.deployments.config import Deployment
    from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
    from tokentwin.serving.deployments.gpu_spec import find_gpu
    from tokentwin.serving.errors import UserError

    rows, context, prompts, chunk, past = (given.pop(name) for name in ("rows", "context", "prompts", "chunk", "past"))
    if not rows and not prompts:
        raise UserError("rows", rows, "makes an empty step; give --rows or --prompts")
    refuse_engine_flags(given)
    stated = read_deployment(deployment_file, given, Deployment(model="Llama-3.1-8B", device="cuda"))
    spec = find_gpu(gpu)
    deployment, defaults = with_engine_defaults(stated, spec)
    speculative = deployment.scheduler.speculative
    drafts = speculative.num_speculative_tokens if speculative else 0
    sizes = uniform_step(rows, context, prompts, chunk, past, drafts)
    learnt = None if calibration is None else calibration_in(calibration)
    if isinstance(learnt, Calibration):
        cost = predicted_cost(gpu, deployment, launches=learnt.launches)
    else:
        cost = predicted_cost(gpu, deployment, learnt)
    explanation, life = explained(cost, sizes), token_life(cost.model, cost.deployment, sizes)
    if style == "json":
        more = {"token_life": [stage._asdict() for stage in life], "defaults": defaults}
        click.echo(json.dumps(_as_dict(explanation) | more))
    else:
        decodes = f"{rows} rows{_with(drafts)} at {context:,}"
        _print(explanation, f"{deployment.model} on {gpu}, {decodes} and {prompts} x {chunk} prompt tokens")
        _print_life(life)
        if defaults:
            click.echo(defaults)


def _print_life(life: list[Stage]) -> None:
    rows = (
        (
            stage.name,
            " x ".join(f"{n:,}" for n in stage.shape),
            stage.dtype,
            str(stage.times),
            shown_number(stage.bytes / 1e6),
        )
        for stage in life
    )
    headings = ("stage", "shape", "type", "times", "MB")
    print_table(headings, rows, "tensors that the tokens pass through, on one device", right=("times", "MB"))


def _as_dict(explanation: Explanation) -> dict[str, Any]:
    operations = [{**vars(o), "level": o.level.word} for o in explanation.operations]
    stages = [stage._asdict() for stage in explanation.stages]
    return {**vars(explanation), "operations": operations, "stages": stages, "level": explanation.level.word}


def _print(explanation: Explanation, title: str) -> None:

    from tokentwin.calibration.trust import TrustLevel

    operations = [
        (
            o.name,
            str(o.count),
            shown_number(o.flops / 1e9),
            shown_number(o.bytes / 1e6),
            shown_number(o.ns / 1e3),
            shown_share(o.utilisation),
            o.bound,
            shown_share(o.sigma) + "*" * (o.level is TrustLevel.EXTRAPOLATED),
        )
        for o in explanation.operations
    ]
    operations.append(("sum", "", "", "", shown_number(sum(explanation.kernels_ns.values()) / 1e3), "", "", ""))
    numbers = ("times", "GFLOP", "MB", "µs", "roofline", "±")
    headings = ("operation", *numbers[:-1], "bound by", "±")
    print_table(headings, operations, title, right=numbers)
    if any(o.level is TrustLevel.EXTRAPOLATED for o in explanation.operations):
        print("* outside the measured shapes")
    _print_parts(explanation)
    if explanation.stages:
        of_stages = ("stage", "layers", "µs")
        print_table(of_stages, _stages(explanation), "on each pipeline stage", right=of_stages)
    hidden = (
        "once for each pass through the pipeline"
        if explanation.stages
        else "which async scheduling hides behind the previous step"
    )
    print(f"before the step, {_us(explanation.host_ns)} µs on the CPU, {hidden}")
    if explanation.launches:
        launch_us, source = _us(explanation.launch_ns), explanation.launch_source
        print(f"{explanation.launches} kernel launches of {launch_us} µs each ({source})")
    because = explanation.untaught or f"of {explanation.why}"
    print(f"trust in the predicted time: {explanation.level.word}, because {because}")


def _print_parts(explanation: Explanation) -> None:
    """Print each part as the sum of its kernels above, and as engines run it, longest first."""
    parts_ns, kernels_ns = explanation.parts_ns, explanation.kernels_ns
    names = sorted({**parts_ns, **kernels_ns}, key=lambda name: -parts_ns.get(name, 0.0))
    parts = [
        (
            name,
            _us(kernels_ns.get(name)),
            _us(ns := parts_ns.get(name, 0.0)),
            shown_share(ns / explanation.step_ns, 1),
        )
        for name in names
    ]
    parts.append(("step", _us(sum(kernels_ns.values())), _us(explanation.step_ns), ""))
    headings = ("part", "kernels alone µs", "in the step µs", "share")
    print_table(
        headings, parts, "the same kernels in an engine's step, corrected by measured steps", right=headings[1:]
    )


def _us(ns: float | None) -> str:
    return "" if ns is None else shown_number(ns / 1e3)


def _stages(explanation: Explanation) -> Iterator[tuple[str, str, str]]:
    """Yield the stages, with alike neighbours together; the transfers come last."""
    first = 0
    for stage, alike in groupby(explanation.stages):
        last = first + len(list(alike)) - 1
        number = str(first) if first == last else f"{first} to {last}"
        yield number, str(stage.layers), _us(stage.ns)
        first = last + 1
    yield "transfers", "", _us(explanation.step_ns - sum(stage.ns for stage in explanation.stages))


def _with(drafts: int) -> str:
    return f" with {drafts} draft tokens each" if drafts else ""
