"""`tokentwin simulate`: run a trace through the simulator and record it."""

from __future__ import annotations

from typing import Any

import click

from tokentwin.costs import Priced, named_prices, priced_deployment
from tokentwin.deployments import deployment_options, read_deployment, refuse_engine_flags
from tokentwin.finite import Finite


@click.command()
@click.argument("trace", type=click.Path())
@click.option("--calibration", "-c", type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--gpu", help="Simulate this GPU from kernel tables; with a calibration of another engine, on this one.")
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the recording.")
@click.option(
    "--replicas", type=click.IntRange(1, 100_000), help="Engines behind the router (of a fleet: in its first pool)."
)
@click.option("--router", help="round-robin (default), random, least-requests, ... (docs/fleet.md), or module:Class.")
@click.option("--price", "prices", multiple=True, help="Dollars per GPU-hour, H100=2.9; by default the catalogue's.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N requests.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the arrival rate.")
@click.option("--summary-only", is_flag=True, help="Do not keep steps and token times: much faster and smaller.")
@click.option(
    "--band/--no-band",
    default=True,
    show_default=True,
    help="Simulate the ends of the 90 % interval of step times too.",
)
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@deployment_options
def simulate(
    trace: str,
    calibration: str | None,
    gpu: str | None,
    out: str,
    replicas: int | None,
    router: str | None,
    prices: tuple[str, ...],
    limit: int | None,
    rate_scale: float | None,
    summary_only: bool,
    band: bool,
    force: bool,
    style: str,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Simulate TRACE with the step times of a calibration, or of a GPU's kernel tables.

    Without --deployment, the calibrated deployment is simulated (Llama-3.1-8B if there is none); flags change single
    fields of it. On a --gpu, KV blocks follow from its memory unless the deployment states them.
    """
    from tokentwin.fleets import asked_fleet, pool_prices
    from tokentwin.run_table import print_metrics, print_reasons, print_tiers
    from tokentwin.simulating import simulated_run
    from traces.reader import read_workload
    from traces.reshape import reshaped

    own = priced_deployment(calibration, gpu, deployment_file, flags)
    if own.gpu:
        refuse_engine_flags(flags)
    fleet = asked_fleet(own.deployment.fleet, replicas, router)
    priced = pool_prices(fleet, own, calibration, gpu, lambda base: read_deployment(deployment_file, flags, base))
    asked = _asked_prices(prices, priced)
    workload = reshaped(read_workload(trace), limit=limit, rate_scale=rate_scale)
    done = simulated_run(out, workload, own, fleet, priced, asked, band=band, details=not summary_only, overwrite=force)
    tiers = {"tier_hit_rates": done.metrics.tier_hit_rates()} if own.deployment.kv_tiers else {}
    print_metrics(done.metrics, style, bands=done.bands, standing=done.standing, **tiers)
    if style == "table":
        print_reasons(done.recording)
        print_tiers(done.metrics)
        click.echo(f"{done.standing['mark']}: {done.standing['reason']}")


def _asked_prices(texts: tuple[str, ...], priced: list[Priced]) -> dict[str, float]:
    """As given. Raises UserError for one of nothing that is simulated."""
    from serving.errors import UserError

    asked, known = named_prices(texts), dict.fromkeys(price.device for price in priced)
    for name in asked:
        if name not in known:
            raise UserError("price", name, f"is of none that is simulated; give {', '.join(known)}")
    return asked
