"""`tokentwin validate front-door`: rung 6, latencies that clients of a server saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tokentwin.options import Finite, deployment_options

TARGET_MISSED = 3


@click.command("front-door")
@click.argument("clients", nargs=-1, required=True, type=click.Path())
@click.option("--front-door", required=True, type=click.Path(), help="File that `calibrate --from-served` wrote.")
@click.option(
    "--served",
    "servers",
    multiple=True,
    type=click.Path(),
    help="Recording of `serve -o` of the same run, once for each of CLIENTS, to also simulate the machine's slowdown "
    "then.",
)
@click.option("--calibration", "-c", type=click.Path(), help="Directory that `tokentwin calibrate` wrote.")
@click.option("--gpu", help="GPU to simulate; step times come from measured times of its kernels.")
@click.option("--replicas", type=int, help="Number of engines behind the router.")
@click.option("--router", help="Router, by name; by default round-robin.")
@click.option("--max-error", type=Finite(min=0), help="Exit with status 3 if an error exceeds this many percent.")
@click.option("--out", "-o", type=click.Path(), help="Also write clients.json here, for the dashboard's Trust page.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@deployment_options
def front_door(
    clients: tuple[str, ...],
    front_door: str,
    servers: tuple[str, ...],
    calibration: str | None,
    gpu: str | None,
    replicas: int | None,
    router: str | None,
    max_error: float | None,
    out: str | None,
    style: str,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Compare latencies that clients of a server saw with a simulation of the same arrivals (rung 6 of validation).

    CLIENTS are recordings of `tokentwin bench --url`. Repeated recordings of one run give the noise floor.
    """
    from tokentwin.commands.validate_external import write_results
    from tokentwin.planning.costs import check_timed
    from tokentwin.planning.deployments import read_deployment
    from tokentwin.planning.measure.front_door import clients_table, hold_against_clients
    from tokentwin.planning.priced_scenario import with_fleet
    from tokentwin.planning.resolution import base_deployment
    from tokentwin.serving.answers.terminal import print_report
    from tokentwin.serving.front_door import FrontDoor

    check_timed(calibration, gpu)
    stated = read_deployment(deployment_file, flags, base_deployment(calibration))
    deployment = with_fleet(stated, replicas, router)
    scenario = {"deployment": deployment, "gpu": gpu, "calibration": calibration}
    door = FrontDoor.load(front_door)
    rows = hold_against_clients(list(map(Path, clients)), scenario, door, list(map(Path, servers)))
    results = {"rows": [row.as_dict() for row in rows]}
    if out:
        names = {"clients": [Path(client).name for client in clients], "front_door": door.source}
        write_results(Path(out) / "clients.json", {**names, **results})
    if style == "json":
        click.echo(json.dumps(results))
    else:
        print_report([clients_table(rows, "rung 6: latencies that clients saw")])
    if max_error is not None and max(abs(row.error_pct) for row in rows) > max_error:
        raise SystemExit(TARGET_MISSED)
