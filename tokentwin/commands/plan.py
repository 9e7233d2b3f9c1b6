"""`tokentwin plan`: the cheapest fleet that meets the objectives on given traffic."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import NO_TRAFFIC, listed, options_of, requested, traffic_options
from tokentwin.planning.plan.request import FleetRequest, PlanRequest
from tokentwin.saved_answer import AnswerOutput, answering
from tokentwin.serving.errors import UserError

if TYPE_CHECKING:
    from tokentwin.planning.plan.document import PlanDocument

INFEASIBLE = 4  # exit status

options = options_of(PlanRequest, FleetRequest)


@click.command()
@click.argument("traffic", type=click.Path(), required=False)
@traffic_options("traffic")
@options(
    "--slo=slos --model --gpu=gpus --tp=tensor_parallel_sizes --policy=policies --vary --split=splits "
    "--mix --spot --interruptions-per-hour --notice-s --restart-s --rank-by --price=prices --energy --pue "
    "--grid-gco2-per-kwh --spares --risk --rate-scale --limit --window-s --router --max-replicas "
    "--calibration --deployment"
)
@options_of(FleetRequest, required=False)("--replicas")
@click.option(
    "--measured",
    type=click.Path(),
    multiple=True,
    help="A run measured on your own server, which corrects the predicted step times (a file or folder that `calibrate "
    "--from-measured` reads); can be repeated.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Number of simulations that run at the same time; by default one for each CPU.",
)
@answering
def plan(jobs: int | None, measured: tuple[str, ...], replicas: int | None, output: AnswerOutput, **given: Any) -> None:
    """Find the cheapest fleet that meets every SLO on TRAFFIC.

    TRAFFIC is a trace, a recording, or a YAML specification for `tokentwin trace synth`. Without it, --prompt and
    --output with --rate, --users or --concurrency make traffic up. All fleets get the same arrivals, or the same users.

    With --save or --format json the answer also says what happens with more or less traffic, and with more or fewer
    replicas. The file has the fleet as soon as it is known, and the rest later. `tokentwin export` writes a saved
    answer as a report.

    With --measured the predictions learn from runs of your own server: a file states the GPU, or --gpu names exactly
    one, and --deployment is what the server ran. The calibration is kept, and `-c` names it next time.

    With --mix and --spot the answer also compares fleets of two kinds of GPUs, and of GPUs on demand beside spot GPUs,
    with the best fleet of a single kind.

    With --replicas the answer is the largest number of users that so many replicas bear within the SLOs; --users is
    then the number that is tried first.

    Within seconds a first answer appears on standard error: a range of fleet sizes from quick estimates.

    The exit status is 4 if no fleet meets the SLOs, or not for a single user.
    """
    from tokentwin.planning.costs import named_prices
    from tokentwin.planning.deployments import named_values
    from tokentwin.planning.plan import planner
    from tokentwin.planning.plan.most_clients import most_clients
    from tokentwin.planning.progress import telling
    from tokentwin.serving.deployments.config import load_deployment
    from tokentwin.traces.without_pandas import spare_pandas

    if given["traffic"] is None:
        raise UserError("traffic", None, NO_TRAFFIC)
    spare_pandas()
    several = {"gpu": "gpus", "tp": "tensor_parallel_sizes", "policy": "policies", "split": "splits", "mix": "mix"}
    for option, name in several.items():
        given[name] = listed(option, given[name]) if given[name] else None
    given["vary"] = named_values("vary", given["vary"], many=True)
    given["prices"], given["spot"] = named_prices(given["prices"]), named_prices(given["spot"], "spot")
    given["energy"] = given["energy"] or None
    if given["deployment"] is not None:
        given["deployment"] = load_deployment(given["deployment"])
    request = (
        requested(PlanRequest, given) if replicas is None else requested(FleetRequest, given | {"replicas": replicas})
    )
    if measured:
        request = _with_measured(request, tuple(map(Path, measured)))
    if isinstance(request, FleetRequest):
        with telling() as tell:
            borne = most_clients(request, jobs=jobs, tell=tell)
        output.finish(borne)
        if not borne.feasible:
            sys.exit(INFEASIBLE)
        return
    shown = False
    with ExitStack() as bars:
        tell = bars.enter_context(telling())

        def on_tables(document: PlanDocument) -> None:
            """Print what is known, because the curves that follow are saved and not printed."""
            nonlocal tell, shown
            output.keep(document)
            if output.style != "json":
                bars.close()  # a bar would be in the way
                output.show(document)
                sys.stdout.flush()
                shown, tell = True, bars.enter_context(telling())

        document = planner.plan(
            request,
            jobs=jobs,
            surroundings=output.whole,
            say=lambda line: click.echo(f"tokentwin: {line}", err=True),
            on_answer=output.keep,
            on_tables=on_tables,
            tell=lambda stage, share: tell(stage, share),
        )
    output.keep(document)
    if not shown:
        output.show(document)
    if not document.feasible:
        sys.exit(INFEASIBLE)


def _with_measured(request: PlanRequest, measured: tuple[Path, ...]) -> PlanRequest:
    """Return the request with a calibration from measured runs, which is kept in the directory of fetched files.

    Raises UserError if the request names a calibration already.
    """
    from tokentwin.planning.measure.kept_runs import kept_runs

    if request.calibration is not None:
        raise UserError("measured", str(measured[0]), "cannot be combined with --calibration; give one of them")
    gpus = request.gpus or ()
    directory = kept_runs(measured, request.served, gpus[0] if len(gpus) == 1 else None)
    click.echo(f"tokentwin: the measured runs are kept as a calibration: -c {directory}", err=True)
    return request.model_copy(update={"calibration": str(directory)})
