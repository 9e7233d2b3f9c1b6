"""`tokentwin plan`: the cheapest fleet that meets the objectives on given traffic."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from planning.plan.request import PlanRequest
from tokentwin.options import listed, options_of, requested

INFEASIBLE = 4  # exit status

option = options_of(PlanRequest)


@click.command()
@click.argument("traffic", type=click.Path())
@option("--slo", "slos", multiple=True, required=True)
@option("--model")
@option("--gpu", "gpus", multiple=True)
@option("--tp", "tensor_parallel_sizes", multiple=True)
@option("--policy", "policies", multiple=True)
@option("--vary", multiple=True, metavar="NAME=V,V")
@option("--split", "splits", multiple=True)
@option("--price", "prices", multiple=True)
@option("--spares", type=int)
@option("--risk", type=float)
@option("--rate-scale", type=float)
@option("--limit", type=int)
@option("--window-s", type=float)
@option("--router")
@option("--max-replicas", type=int)
@option("--calibration", "-c", type=click.Path())
@option("--deployment", "-d", type=click.Path())
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Number of simulations that run at once; by default one for each CPU.",
)
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@click.option("--save", type=click.Path(path_type=Path), help="Save the whole answer to this JSON file.")
@click.option("--force", is_flag=True, help="Replace the file of --save if it exists.")
def plan(jobs: int | None, style: str, save: Path | None, force: bool, **given: Any) -> None:
    """Find the cheapest fleet that meets every SLO on TRAFFIC.

    TRAFFIC is a trace, a recording, or a YAML specification as `tokentwin trace synth` takes it. All fleets get the
    same arrivals.

    With --save or --format json the answer also says what happens with more or less traffic, and with more or fewer
    replicas. `tokentwin export` makes a report of a saved answer.

    Within seconds a first answer by parts of fleets, a range, is said on standard error.

    The exit status is 4 if no fleet meets the SLOs.
    """
    from planning.costs import named_prices
    from planning.plan import planner
    from planning.plan.headline import first_answer
    from planning.progress import telling
    from planning.settings import named_values
    from serving.deployments.config import load_deployment
    from serving.whole_file import check_free
    from tokentwin.commands.saved_answer import finish
    from traces.without_pandas import spare_pandas

    spare_pandas()
    if save is not None:
        check_free(save, force)
    for name in ("gpus", "tensor_parallel_sizes", "policies", "splits"):
        given[name] = listed(given[name]) or None
    given["vary"] = named_values("vary", given["vary"])
    given["prices"] = named_prices(given["prices"])
    if given["deployment"] is not None:
        given["deployment"] = load_deployment(given["deployment"])
    request = requested(PlanRequest, given)
    with telling() as tell:
        document = planner.plan(
            request,
            jobs=jobs,
            surroundings=style == "json" or save is not None,
            first=lambda points: click.echo(f"tokentwin: {first_answer(points, request.spares)}", err=True),
            tell=tell,
        )
    finish(document, style, save, force)
    if not document.feasible:
        sys.exit(INFEASIBLE)
