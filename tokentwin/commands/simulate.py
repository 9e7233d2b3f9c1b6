"""`tokentwin simulate`: run a trace through the simulator and record it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import NO_TRAFFIC, deployment_options, options_of, requested, traffic_options
from tokentwin.planning.request import Timing
from tokentwin.planning.scenario import Scenario, TraceWorkload

if TYPE_CHECKING:
    from tokentwin.serving.deployments.config import Deployment

options = options_of(TraceWorkload, Scenario, Timing)


@click.command()
@click.argument("trace", type=click.Path(), required=False)
@traffic_options("trace")
@options("--calibration --gpu")
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory to write the recording to.")
@options("--replicas --router --price=prices --pue --grid-gco2-per-kwh --limit --rate-scale --warm-up=warm_up_s")
@click.option(
    "--acceptance",
    type=click.Path(),
    help="Recording of the real engine whose acceptance rates of draft tokens are used (speculative decoding).",
)
@click.option(
    "--front-door",
    type=click.Path(),
    help="Also simulate the API server and its clients, with times from this file. "
    "The twin of a server, as --calibration, brings its own.",
)
@click.option("--summary-only", is_flag=True, help="Do not record steps and token times; this is much faster.")
@click.option(
    "--band/--no-band",
    default=True,
    help="Also simulate both ends of the 90 % interval of step times, for bands of figures.",
)
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@deployment_options
def simulate(
    out: str,
    prices: tuple[str, ...],
    acceptance: str | None,
    front_door: str | None,
    summary_only: bool,
    band: bool,
    force: bool,
    style: str,
    deployment_file: str | None,
    **given: Any,
) -> None:
    """Simulate TRACE with step times from a calibration, or from measured kernels of a GPU.

    TRACE is a trace in any format, a recording, or a YAML specification for `trace synth`. Without a trace, --prompt
    and --output with --rate, --users or --concurrency make traffic up.

    Without --deployment this simulates the calibration's deployment, or Llama-3.1-8B if there is none. Flags change
    single settings of the deployment. With --gpu the number of KV blocks follows from the GPU's memory, unless the
    deployment states it.
    """
    from tokentwin.planning.costs import check_timed, named_prices
    from tokentwin.planning.deployments import read_deployment, refuse_engine_flags
    from tokentwin.planning.learn.front_door import learnt_front_door
    from tokentwin.planning.made_up import assumed
    from tokentwin.planning.priced_scenario import with_fleet
    from tokentwin.planning.resolution import base_deployment
    from tokentwin.planning.simulation import recorded
    from tokentwin.run_table import print_metrics, print_reasons, print_tiers
    from tokentwin.serving.errors import UserError
    from tokentwin.serving.front_door import FrontDoor
    from tokentwin.traces.without_pandas import spare_pandas

    spare_pandas()
    workload = {name: given.pop(name) for name in ("trace", "limit", "rate_scale", "warm_up_s")}
    if workload["trace"] is None:
        raise UserError("trace", None, NO_TRAFFIC)
    said = assumed(workload["trace"])
    if said:
        workload = _made_up(workload)
    calibration, gpu, replicas, router = (given.pop(name) for name in ("calibration", "gpu", "replicas", "router"))
    site = {name: given.pop(name) for name in ("pue", "grid_gco2_per_kwh")}
    check_timed(calibration, gpu)
    deployment = read_deployment(deployment_file, given, base_deployment(calibration))
    fleet = with_fleet(deployment, replicas, router)
    if acceptance is not None:
        fleet = _accepting(fleet, acceptance)
    if gpu is not None:
        refuse_engine_flags(given)
    run = {"deployment": fleet, "workload": workload, "gpu": gpu, "calibration": calibration, **site}
    scenario = requested(Scenario, run | {"prices": named_prices(prices)}).priced()
    if scenario.gpu:
        refuse_engine_flags(given)
    for name in named_prices(prices):
        if name not in scenario.devices:
            raise UserError(
                "price", name, f"is not in the simulated fleet; give prices for {', '.join(scenario.devices)}"
            )
    if front_door is not None:
        scenario = replace(scenario, front_door=learnt_front_door(front_door) or FrontDoor.load(front_door))
    done = recorded(scenario, out, band=band, details=not summary_only, overwrite=force)
    tiers = {"tier_hit_rates": done.metrics.tier_hit_rates()} if scenario.deployment.kv_tiers else {}
    more: dict[str, Any] = {"defaults": done.defaults} if done.defaults else {}
    if said:
        more["assumed"] = said
    if done.seen_by:
        more["seen_by"] = done.seen_by
    if done.power_note:
        more["power"] = done.power_note
    if done.adapters:
        more["adapters"] = done.adapters
    if done.encoder:
        more["encoder"] = done.encoder
    if done.logits:
        more["logits"] = done.logits
    print_metrics(done.metrics, style, done.bands, done.capacity, trust=done.trust._asdict(), **tiers, **more)
    if style == "table":
        print_reasons(done.recording)
        print_tiers(done.metrics)
        trust = f"{done.trust.level}: {done.trust.reason}"
        lines = (said, done.adapters, done.encoder, done.logits, trust, done.power_note, done.seen_by, *done.defaults)
        click.echo("\n".join(filter(None, lines)))


def _made_up(workload: dict[str, Any]) -> dict[str, Any]:
    """Return a specification with the options of a workload. Raises UserError for options of a trace."""
    from tokentwin.serving.errors import UserError

    for name in ("limit", "rate_scale"):
        if workload[name] is not None:
            raise UserError(name.replace("_", "-"), workload[name], "changes a trace; leave it out for made-up traffic")
    spec: dict[str, Any] = workload["trace"].model_dump(mode="json")
    return spec if workload["warm_up_s"] is None else spec | {"warm_up_s": workload["warm_up_s"]}


def _accepting(deployment: Deployment, recording: str) -> Deployment:
    from tokentwin.calibration.acceptance import as_accepted
    from tokentwin.serving.errors import UserError
    from tokentwin.traces.recording import Recording

    if deployment.scheduler.speculative is None:
        raise UserError("acceptance", recording, "needs scheduler.speculative in the deployment; leave it out")
    return as_accepted(deployment, [Recording.load(recording)])
