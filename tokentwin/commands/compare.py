"""`tokentwin compare`: two deployments, policies or recorded runs on the same requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import NO_TRAFFIC, Finite, options_of, requested, traffic_options
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest
from tokentwin.planning.request import Timing
from tokentwin.saved_answer import AnswerOutput, answering

if TYPE_CHECKING:
    from tokentwin.planning.compare.document import ComparisonDocument

NO_DIFFERENCE = 3
REVERSED = 4
_OF_THE_RUN = ("replicas", "router", "gpu", "calibration")  # settings of a side that are not settings of its deployment

_THRESHOLD = (
    "Change of a latency in percent that counts as a gain or a loss. "
    f"[default: {100 * CompareRequest.model_fields['threshold'].default:g}]"
)

options = options_of(CompareRequest, Timing, required=False)


@click.command()
@click.argument("sides", nargs=-1, type=click.Path(), metavar="[A B]")
@options("--trace=traffic")
@traffic_options("traffic")
@click.option("--deployment", "-d", type=click.Path(), help="Deployment of both sides: a YAML file, or a recording.")
@options("--calibration --gpu --model --tensor-parallel-size")
@click.option("--a", "own_a", multiple=True, metavar="NAME=VALUE", help="Setting of A, e.g. policy=vllm; repeatable.")
@click.option("--b", "own_b", multiple=True, metavar="NAME=VALUE", help="Setting of B, e.g. policy=fair; repeatable.")
@options("--seeds --limit --rate-scale --window-s --warm-up=warm_up_s")
@click.option(
    "--slo", help="Also compare the share of requests within these latency bounds in ms, e.g. 'ttft:200 tpot:50'."
)
@click.option("--threshold", type=Finite(min=0), help=_THRESHOLD)
@click.option("--engine", is_flag=True, help="Also run both sides on the real engine.")
@click.option(
    "--repeats", default=1, type=click.IntRange(min=1), help="With --engine: number of real runs of each side."
)
@click.option(
    "--minutes",
    type=Finite(min=0, min_open=True),
    help="With --engine: run only as many of the first requests as fit into this time.",
)
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), help="With --engine: directory to write the real recordings to."
)
@answering
def compare(
    sides: tuple[str, ...],
    deployment: str | None,
    own_a: tuple[str, ...],
    own_b: tuple[str, ...],
    slo: str | None,
    threshold: float | None,
    engine: bool,
    repeats: int,
    minutes: float | None,
    out: Path | None,
    output: AnswerOutput,
    **given: Any,
) -> None:
    """Compare B with A, request by request.

    A and B are two deployments in YAML, which are simulated on --trace, or two directories with recordings of the same
    workload. Without A and B, both sides start from --deployment or from the calibration's deployment, and --a and --b
    change settings of one side. NAME is a setting of a deployment (policy, scheduler.max_num_seqs, fleet.router), or
    replicas, router, gpu or calibration.

    Exit status: 0 if the sides differ significantly, 3 if they do not, 4 if the real engine (--engine) contradicts a
    difference that the simulation claims, 2 for bad input.
    """
    from tokentwin.planning.compare import comparer
    from tokentwin.planning.progress import telling
    from tokentwin.serving.errors import UserError
    from tokentwin.serving.metrics import parse_slo

    given |= {"bounds": parse_slo(slo) if slo else None, "threshold": None if threshold is None else threshold / 100}
    if len(sides) not in (0, 2):
        raise UserError("A B", list(sides), "give both A and B, or neither of them with --a and --b")
    for name, side in zip("AB", sides, strict=False):
        if not Path(side).exists():
            raise UserError(name, side, "does not exist; give a deployment in YAML or a directory of recordings")
    recorded = [Path(side).is_dir() for side in sides]
    if any(recorded):
        judged = {name: given.pop(name) for name in ("bounds", "threshold")}
        if not all(recorded) or any((*given.values(), deployment, own_a, own_b, engine, out)):
            raise UserError(
                "A B",
                list(sides),
                "recordings can only be compared with recordings; leave the options of a simulation out",
            )
        of_two = requested(CompareRecordingsRequest, {"a": sides[0], "b": sides[1], **judged})
        _finish(comparer.compare_recordings(of_two).called(*sides), output)
        return
    if given["traffic"] is None:
        raise UserError("trace", None, NO_TRAFFIC)
    if engine and given["warm_up_s"] is not None:
        raise UserError("warm-up", given["warm_up_s"], "applies to simulated runs only; leave it out with --engine")
    if engine and out is None:
        raise UserError("out", None, "is missing; give the directory where --engine records its runs")
    if not engine and (out is not None or repeats > 1 or minutes):
        given_first = {"out": out, "minutes": minutes, "repeats": repeats}
        field, value = next((name, value) for name, value in given_first.items() if value)
        raise UserError(field, str(value), "needs --engine; leave it out")
    if sides and deployment:
        raise UserError("deployment", deployment, "cannot be combined with the deployments A and B; leave it out")
    timing = requested(Timing, {name: given.pop(name) for name in Timing.model_fields})
    files = sides or (deployment, deployment)
    a, b = (_side(f"--{s}", file, pairs) for s, file, pairs in zip("ab", files, (own_a, own_b), strict=True))
    request = requested(CompareRequest, given | {"a": a, "b": b, "timing": timing})
    if not (sides or engine) and request.a == request.b:
        raise UserError(
            "a/b", list(own_a) or None, "A and B are the same; change a setting of one side, e.g. --b policy=fair"
        )
    names = [
        " ".join([*([file] if file else []), *own]) or "as it is"
        for file, own in zip(files, (own_a, own_b), strict=True)
    ]
    with telling() as tell:
        if engine and out is not None:
            document = comparer.compare_on_engine(
                request,
                out,
                repeats=repeats,
                minutes=minutes,
                overwrite=output.force,
                say=lambda line: click.echo(line, err=True),
                tell=tell,
            )
        else:
            document = comparer.compare(request, tell)
    _finish(document.called(*names), output)


def _side(name: str, file: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of one side, from a file and from `NAME=VALUE` pairs with values in YAML."""
    from tokentwin.planning.deployments import named_values, stated_deployment

    own = named_values(name, pairs)
    run = {name: own.pop(name) for name in _OF_THE_RUN if name in own}
    return {**run, "settings": own, "deployment": stated_deployment(file) if file else None}


def _finish(document: ComparisonDocument, output: AnswerOutput) -> None:
    """Save and print the comparison, and exit with its status."""
    output.finish(document)
    if any(row.outcome == "reversed" for row in document.ranking or ()):
        raise SystemExit(REVERSED)
    if not (document.simulated or document).difference:
        raise SystemExit(NO_DIFFERENCE)
