"""`tokentwin plan`: the cheapest fleet that meets the objectives on given traffic."""

from __future__ import annotations

import sys
from typing import Any

import click

from planning.plan.request import PlanRequest
from tokentwin.options import listed, options_of, requested
from tokentwin.saved_answer import AnswerOutput, answering

INFEASIBLE = 4  # exit status

options = options_of(PlanRequest)


@click.command()
@click.argument("traffic", type=click.Path())
@options(
    "--slo=slos --model --gpu=gpus --tp=tensor_parallel_sizes --policy=policies --vary --split=splits "
    "--price=prices --spares --risk --rate-scale --limit --window-s --router --max-replicas --calibration "
    "--deployment"
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Number of simulations that run at the same time; by default one for each CPU.",
)
@answering
def plan(jobs: int | None, output: AnswerOutput, **given: Any) -> None:
    """Find the cheapest fleet that meets every SLO on TRAFFIC.

    TRAFFIC is a trace, a recording, or a YAML specification for `tokentwin trace synth`. All fleets get the same
    arrivals.

    With --save or --format json the answer also says what happens with more or less traffic, and with more or fewer
    replicas. `tokentwin export` writes a saved answer as a report.

    Within seconds a first answer appears on standard error: a range of fleet sizes from quick estimates.

    The exit status is 4 if no fleet meets the SLOs.
    """
    from planning.costs import named_prices
    from planning.deployments import named_values
    from planning.plan import planner
    from planning.progress import telling
    from serving.deployments.config import load_deployment
    from traces.without_pandas import spare_pandas

    spare_pandas()
    for option, name in (("gpu", "gpus"), ("tp", "tensor_parallel_sizes"), ("policy", "policies"), ("split", "splits")):
        given[name] = listed(option, given[name]) if given[name] else None
    given["vary"] = named_values("vary", given["vary"], many=True)
    given["prices"] = named_prices(given["prices"])
    if given["deployment"] is not None:
        given["deployment"] = load_deployment(given["deployment"])
    request = requested(PlanRequest, given)
    with telling() as tell:
        document = planner.plan(
            request,
            jobs=jobs,
            surroundings=output.whole,
            say=lambda line: click.echo(f"tokentwin: {line}", err=True),
            tell=tell,
        )
    output.finish(document)
    if not document.feasible:
        sys.exit(INFEASIBLE)
