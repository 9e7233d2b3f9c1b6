"""`tokentwin simulate`: run a trace through the simulator and record it."""

from __future__ import annotations

import json
from typing import Any

import click

from tokentwin.deployments import deployment_options, read_deployment
from tokentwin.finite import Finite


@click.command()
@click.argument("trace", type=click.Path())
@click.option("--calibration", "-c", required=True, type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the recording.")
@click.option("--replicas", default=1, show_default=True, type=click.IntRange(min=1), help="Engines behind the router.")
@click.option("--router", default="round-robin", show_default=True, help="round-robin, least-tokens, or module:Class.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N requests.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the arrival rate.")
@click.option("--summary-only", is_flag=True, help="Do not keep steps and token times: much faster and smaller.")
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@deployment_options
def simulate(
    trace: str,
    calibration: str,
    out: str,
    replicas: int,
    router: str,
    limit: int | None,
    rate_scale: float | None,
    summary_only: bool,
    force: bool,
    style: str,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Simulate TRACE with the step times of a calibration.

    Without --deployment, the calibrated deployment is simulated; flags change single fields of it.
    """
    from calibration.step_cost import Calibration, StepCost
    from serving.config import Deployment, parse
    from serving.errors import UserError
    from sim.router import find_router
    from sim.simulate import simulate_to
    from tokentwin.run_table import print_metrics, print_rejections
    from traces.reader import read_workload
    from traces.recording import Recording
    from traces.reshape import reshaped
    from traces.run_metrics import RunMetrics

    measured = Calibration.load(calibration)
    base = parse(Deployment, json.loads(measured.deployment), where="calibration.deployment")
    deployment = read_deployment(deployment_file, flags, base)
    if deployment.gpu_memory_utilization is not None:
        raise UserError(
            "gpu_memory_utilization",
            deployment.gpu_memory_utilization,
            "is for the real engine, which prints the num_blocks it found; give scheduler.num_blocks",
        )
    for name in Deployment.model_fields.keys() - {"policy", "scheduler"}:
        asked, known = getattr(deployment, name), getattr(base, name)
        if asked != known:
            raise UserError(name, asked, f"this calibration was measured with {known}; calibrate for the other first")
    workload = reshaped(read_workload(trace), limit=limit, rate_scale=rate_scale)
    cost = StepCost(measured)
    simulate_to(
        out,
        workload,
        deployment,
        cost,
        replicas=replicas,
        router=find_router(router),
        calibration=measured.id,
        steps=not summary_only,
        tokens=not summary_only,
        overwrite=force,
    )
    outside = cost.extrapolated / max(cost.asked, 1)
    recording = Recording.load(out)
    print_metrics(RunMetrics.of(recording), style, extrapolated_share=outside)
    if style == "table":
        print_rejections(recording)
    if outside and style == "table":
        click.echo(
            f"extrapolated: {100 * outside:.1f} % of the steps lie outside what calibration {measured.id} measured"
        )
