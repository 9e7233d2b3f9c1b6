"""`tokentwin calibrate`: measure the engine and fit the step cost model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import deployment_options, options_of, requested
from tokentwin.planning.deployments import read_deployment
from tokentwin.planning.measure.request import CalibrateRequest
from tokentwin.serving.answers.figures import shown_change, shown_percent
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokentwin.calibration.steps.external_calibration import ExternalCalibration
    from tokentwin.calibration.steps.step_cost import Calibration
    from tokentwin.serving.front_door import FrontDoor

options = options_of(CalibrateRequest)


@click.command()
@options(
    "--out --minutes --from-recordings=recordings --from-iterations=iterations --from-measured=measured "
    "--from-case=case --data --gpu --from-served=served --client --engine --kernels"
)
@click.option("--force", is_flag=True, help="Replace an existing calibration.")
@deployment_options
def calibrate(force: bool, deployment_file: str | None, **given: Any) -> None:
    """Run the real engine on a designed set of short traces, and fit the time of a step.

    This writes calibration.json (the fitted costs, the measured range, held-out errors, hardware and noise),
    steps.parquet and the recordings.

    With --from-iterations or --from-case no engine runs. Measurements of another engine correct the step times that
    follow from measured kernels of its GPU. The result is engine.json, which `simulate` also accepts.

    With --from-measured any number of runs of your servers join the published runs behind every prediction. The result
    is measured.json. `simulate` and `plan` accept it for every GPU and model; it helps most where they are the measured
    ones.

    With --from-served the command fits the time that an API server and its clients add to a request. It writes
    front_door.json for `simulate --front-door`.
    """
    from tokentwin.calibration.steps.external_calibration import ExternalCalibration
    from tokentwin.calibration.steps.measured_runs import MeasuredRuns
    from tokentwin.commands.validate_external import print_results
    from tokentwin.planning.measure import calibrator
    from tokentwin.serving.answers.terminal import print_report
    from tokentwin.serving.front_door import FrontDoor

    stated = {name: given.pop(name) for name in CalibrateRequest.model_fields if name in given}
    if deployment_file or any(value is not None for value in given.values()):
        stated["deployment"] = read_deployment(deployment_file, given)
    request = requested(CalibrateRequest, stated)
    calibration, outcome = calibrator.calibrate(request, overwrite=force, say=partial(click.echo, err=True))
    if outcome is not None:
        print_results([outcome])
    elif isinstance(calibration, ExternalCalibration):
        _print_correction(calibration)
    elif isinstance(calibration, MeasuredRuns):
        print_report(calibration.report())
    elif isinstance(calibration, FrontDoor):
        _print_front_door(calibration)
    else:
        print_calibration(calibration)
    click.echo(f"saved in {request.out}")


def _print_correction(learnt: ExternalCalibration) -> None:
    """Print the correction for another engine, and its held-out errors."""
    _print_factors(learnt.correction.factors, learnt.correction.added_ns, f"correction {learnt.id}")
    errors = (
        (name, f"{e['steps']:.0f}", f"{e['median_pct']:.2f} %", f"{e['p95_pct']:.2f} %", f"{e['bias_pct']:+.2f} %")
        for name, e in learnt.residuals.items()
    )
    headings = ("regime", "steps", "median error", "p95 error", "bias")
    print_table(headings, errors, "errors on the middle third of the steps, with factors fitted to the rest")
    print(learnt.step_interval)


def _print_factors(factors: Mapping[str, float], added_ns: Mapping[str, float], title: str) -> None:
    print_table(("part", "factor"), ((name, f"{factor:.3f}") for name, factor in factors.items()), title)
    print_table(("added for", "µs"), ((name, f"{ns / 1e3:,.1f}") for name, ns in added_ns.items()))


def _print_front_door(learnt: FrontDoor) -> None:
    """Print the times that a front door adds, part by part."""
    fields = {name: field.description or "" for name, field in type(learnt).model_fields.items()}
    times = ((said, f"{getattr(learnt, name) / 1e3:,.2f}") for name, said in fields.items() if name.endswith("_ns"))
    print_table(("time for", "µs"), times, f"front door, from {learnt.source}")


def print_calibration(calibration: Calibration) -> None:
    surfaces = calibration.surfaces
    if surfaces is not None:
        _print_factors(surfaces.correction.factors, surfaces.added_ns, "correction of the kernel times")
        click.echo(f"steps beyond the CUDA graphs: {shown_percent(100 * surfaces.eager)} longer outside of attention")
    prices = (
        (f"{kind}: {name}", meaning, f"{paid[name] / 1e6:,.3f}")
        for kind, features, paid in calibration.priced
        for name, meaning in features.items()
    )
    print_table(("part", "time for", "µs each"), prices, f"calibration {calibration.id}")
    errors = (
        (
            name,
            str(r.steps),
            shown_percent(r.median_error_pct),
            shown_percent(r.p95_error_pct),
            shown_change(r.bias_pct),
        )
        for name, r in calibration.residuals.items()
    )
    click.echo(f"launches without graphs: {calibration.launches}")
    click.echo(calibration.chosen)
    print_table(("regime", "held-out steps", "median error", "p95 error", "bias"), errors)
