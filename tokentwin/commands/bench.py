"""`tokentwin bench`: replay a trace on the real engine and record it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from planning.deployments import read_deployment
from tokentwin.deployment_options import deployment_options
from tokentwin.finite import Finite


@click.command()
@click.argument("trace", type=click.Path())
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the recording.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N requests.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the arrival rate.")
@click.option("--virtual-arrivals", is_flag=True, help="Offer all requests at once, to measure saturation.")
@click.option(
    "--time-operations", is_flag=True, help="Time every operation of every step; this is slower and uses no graphs."
)
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@deployment_options
def bench(
    trace: str,
    out: str,
    limit: int | None,
    rate_scale: float | None,
    virtual_arrivals: bool,
    time_operations: bool,
    force: bool,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Replay TRACE in real time on the real engine and record every step and token.

    Requests are offered at their intended arrivals (or with the trace's own concurrency) and timed from there.
    Outputs have the trace's lengths: end-of-sequence is ignored. Ctrl-C writes what there is.
    """
    from tokentwin.run_table import print_reasons
    from traces.reader import read_workload
    from traces.recording import Recording
    from traces.reshape import reshaped

    deployment = read_deployment(deployment_file, flags)
    workload = reshaped(read_workload(trace), limit=limit, rate_scale=rate_scale)

    from planning.measure.load_engine import load_engine
    from planning.progress import counting
    from realengine.replay import record

    with closing(load_engine(deployment)) as engine, counting("replaying", len(list(workload.requests))) as advance:
        if time_operations:
            engine.time_operations()
        done = record(
            workload,
            engine,
            out,
            virtual_arrivals=virtual_arrivals,
            overwrite=force,
            progress=advance,
        )
    click.echo(
        f"{done.status}: {done.finished}/{done.requests} requests in {done.duration_ns / 1e9:.1f} s, recorded in {out}"
    )
    print_reasons(Recording.load(out))
    if done.status != "complete":
        raise SystemExit(130)
