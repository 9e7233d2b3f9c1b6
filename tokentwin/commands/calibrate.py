"""`tokentwin calibrate`: measure the engine and fit the step cost model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from planning.deployments import read_deployment
from planning.measure.request import CalibrateRequest
from tokentwin.options import deployment_options, options_of, requested

if TYPE_CHECKING:
    from calibration.steps.external_calibration import ExternalCalibration
    from calibration.steps.step_cost import Calibration
    from serving.front_door import FrontDoor

option = options_of(CalibrateRequest)


@click.command()
@option("--out", "-o", required=True, type=click.Path())
@option("--minutes", type=float)
@option("--from-recordings", "recordings", multiple=True, type=click.Path())
@option("--from-iterations", "iterations", type=click.Path())
@option("--from-case", "case", type=click.Path())
@option("--data", type=click.Path())
@option("--gpu")
@option("--from-served", "served", type=click.Path())
@option("--client", type=click.Path())
@option("--engine", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing calibration.")
@deployment_options
def calibrate(force: bool, deployment_file: str | None, **given: Any) -> None:
    """Run the engine over a designed set of short traces and fit what a step costs.

    This writes calibration.json (prices, domain, held-out errors, hardware, noise), steps.parquet and the recordings.

    With --from-iterations or --from-case nothing is run. The measurements of another engine then correct the kernel
    tables of its GPU. This writes engine.json, which `simulate` also accepts.

    With --from-served it learns what an API server and a client add to a request, and writes front_door.json for
    `simulate --front-door`.
    """
    from calibration.steps.external_calibration import ExternalCalibration
    from planning.measure import calibrator
    from serving.front_door import FrontDoor
    from tokentwin.commands.validate_external import print_results

    stated = {name: given.pop(name) for name in CalibrateRequest.model_fields if name in given}
    if deployment_file or any(value is not None for value in given.values()):
        stated["deployment"] = read_deployment(deployment_file, given)
    request = requested(CalibrateRequest, stated)
    calibration, outcome = calibrator.calibrate(request, overwrite=force, say=partial(click.echo, err=True))
    if outcome is not None:
        print_results([outcome])
    elif isinstance(calibration, ExternalCalibration):
        _print_correction(calibration)
    elif isinstance(calibration, FrontDoor):
        _print_front_door(calibration)
    else:
        print_calibration(calibration)
    click.echo(f"saved in {request.out}")


def _print_correction(learnt: ExternalCalibration) -> None:
    """What was learnt of another engine, and held-out errors."""
    from rich.console import Console
    from rich.table import Table

    factors = Table("part", "factor", title=f"correction {learnt.id}", title_justify="left")
    for name, factor in learnt.correction.factors.items():
        factors.add_row(name, f"{factor:.3f}")
    added = Table("added for", "µs", title_justify="left")
    for name, ns in learnt.correction.added_ns.items():
        added.add_row(name, f"{ns / 1e3:,.1f}")
    errors = Table(
        "regime",
        "steps",
        "median error",
        "p95 error",
        "bias",
        title="the middle third, from the others",
        title_justify="left",
    )
    for name, e in learnt.residuals.items():
        errors.add_row(
            name, f"{e['steps']:.0f}", f"{e['median_pct']:.2f} %", f"{e['p95_pct']:.2f} %", f"{e['bias_pct']:+.2f} %"
        )
    console = Console()
    for table in (factors, added, errors):
        console.print(table)
    console.print(str(learnt.step_interval))


def _print_front_door(learnt: FrontDoor) -> None:
    """What it adds, and where."""
    from rich.console import Console
    from rich.table import Table

    times = Table("what it pays for", "µs", title=f"front door, from {learnt.source}", title_justify="left")
    for name, field in type(learnt).model_fields.items():
        if name.endswith("_ns"):
            times.add_row(field.description, f"{getattr(learnt, name) / 1e3:,.2f}")
    Console().print(times)


def print_calibration(calibration: Calibration) -> None:
    from rich.console import Console
    from rich.table import Table

    from calibration.steps.features import CPU_FEATURES

    prices = Table("part", "what it pays for", "µs each", title=f"calibration {calibration.id}")
    for name, meaning in calibration.features.items():
        prices.add_row(f"step: {name}", meaning, f"{calibration.step_prices_ps[name] / 1e6:,.3f}")
    for name, meaning in CPU_FEATURES.items():
        prices.add_row(f"cpu: {name}", meaning, f"{calibration.cpu_prices_ps[name] / 1e6:,.3f}")
    errors = Table("regime", "held-out steps", "median error", "p95 error", "bias")
    for name, r in calibration.residuals.items():
        errors.add_row(
            name, str(r.steps), f"{r.median_error_pct:.1f} %", f"{r.p95_error_pct:.1f} %", f"{r.bias_pct:+.1f} %"
        )
    console = Console()
    console.print(prices)
    console.print(errors)
