"""`tokentwin bench`: replay a trace on the real engine and record it."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from planning.deployments import read_deployment
from planning.traffic import Offered
from tokentwin.finite import Finite
from tokentwin.options import deployment_options, options_of, requested

option = options_of(Offered)


@click.command()
@click.argument("traffic", metavar="TRACE", type=click.Path())
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory to write the recording to.")
@option("--limit", type=int)
@option("--rate-scale", type=float)
@option("--window-s", type=float)
@click.option(
    "--minutes", type=Finite(min=0, min_open=True), help="Run only the first requests that fit into this time."
)
@click.option("--virtual-arrivals", is_flag=True, help="Send all requests at once, to measure saturation.")
@click.option(
    "--time-operations",
    is_flag=True,
    help="Time every operation of every step; this is slower and runs without CUDA graphs.",
)
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@deployment_options
def bench(
    out: str,
    minutes: float | None,
    virtual_arrivals: bool,
    time_operations: bool,
    force: bool,
    deployment_file: str | None,
    **given: Any,
) -> None:
    """Replay TRACE in real time on the real engine, and record every step and token.

    Requests are sent at the arrival times of the trace, or with the trace's own concurrency, and latencies count from
    there. Every output has the length that the trace states; end-of-sequence tokens are ignored. If you press Ctrl-C,
    what was recorded so far is written.
    """
    from serving.errors import UserError
    from tokentwin.run_table import print_reasons
    from traces.recording import Recording

    request = requested(Offered, {name: given.pop(name) for name in Offered.model_fields})
    if (Path(out) / "runs.parquet").exists() and not force:
        raise UserError("out", out, "holds a recording; replace it with --force, or choose another directory")
    deployment, workload = read_deployment(deployment_file, given), request.workload()

    from planning.measure.real_engine import fitting, load_engine
    from planning.progress import counting
    from realengine.replay import at_once, record

    say = partial(click.echo, err=True)
    with closing(load_engine(deployment, say)) as engine:
        if time_operations:
            engine.time_operations()
        offered = fitting(at_once(workload) if virtual_arrivals else workload, engine, minutes, say)
        with counting("replaying", len(list(offered.requests))) as advance:
            done = record(offered, engine, out, overwrite=force, progress=advance)
    click.echo(
        f"{done.status}: {done.finished}/{done.requests} requests in {done.duration_ns / 1e9:.1f} s, recorded in {out}"
    )
    print_reasons(Recording.load(out))
    if done.status != "complete":
        raise SystemExit(130)
