"""`tokentwin bench`: replay a trace on the real engine, or send it to a server, and record it."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from tokentwin.options import Finite, deployment_options, options_of, requested
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.deployments import ENGINES, on_engine, read_deployment
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.traffic import Offered
from tokentwin.serving.deployments.config import Deployment

options = options_of(Offered, BenchTarget, Scenario, required=False)
_OF_A_REPLAY = ("minutes", "virtual_arrivals", "time_operations", "replicas", "router", "engine")


@click.command()
@click.argument("traffic", metavar="TRACE", type=click.Path())
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory to write the recording to.")
@options("--limit --rate-scale --window-s")
@click.option(
    "--minutes",
    type=Finite(min=0, min_open=True),
    help="Send only as many of the first requests as fit into this time.",
)
@click.option("--virtual-arrivals", is_flag=True, help="Send all requests at once, to measure the maximum throughput.")
@click.option(
    "--time-operations",
    is_flag=True,
    help="Measure the time of every operation; this is slower and runs without CUDA graphs.",
)
@click.option(
    "--engine", type=click.Choice(ENGINES), help="Real engine: ours, or vLLM in a separate Python environment."
)
@options("--replicas --router --url --endpoint")
@options_of(BenchTarget, envvar="TOKENTWIN_API_KEY", show_envvar=True)("--api-key")
@options("--timeout-s --vocab-size")
@click.option("--force", is_flag=True, help="Replace an existing recording.")
@deployment_options
def bench(
    out: str,
    force: bool,
    deployment_file: str | None,
    **given: Any,
) -> None:
    """Replay TRACE in real time on the real engine, and record every step and token.

    Requests are sent at the arrival times of the trace, or with the trace's own concurrency. Latencies count from the
    time at which a request should be sent. Every output has the length that the trace states; end-of-sequence tokens
    are ignored. If you press Ctrl-C, the recording so far is written.

    With --engine vllm the real engine is vLLM itself (`make vllm`; docs/vllm.md).

    With --replicas several engines run, each in a separate process, and a router sends each request to one of them.

    With --url the command sends TRACE to a server with OpenAI's API, such as vLLM, SGLang or `tokentwin serve`, and
    records what the client sees. --model is then the model's name on that server, and --deployment describes the
    server's deployment.

    \b
      tokentwin bench trace.csv --url http://localhost:8000 -o measured
    """
    from tokentwin.serving.errors import UserError
    from tokentwin.traces.live_recording import recover

    request = requested(Offered, {name: given.pop(name) for name in Offered.model_fields})
    target = {name: given.pop(name) for name in BenchTarget.model_fields}
    replay = {name: given.pop(name) for name in _OF_A_REPLAY}
    recover(Path(out))
    if (Path(out) / "runs.parquet").exists() and not force:
        raise UserError("out", out, "contains a recording; replace it with --force, or choose another directory")
    if target["url"] is None:
        for name in ("endpoint", "timeout_s", "vocab_size"):
            if target[name] is not None:
                raise UserError(name.replace("_", "-"), target[name], "describes a server; add --url, or leave it out")
        deployment = _deployed(deployment_file, given, replay.pop("replicas"), replay.pop("router"))
        deployment = on_engine(deployment, replay.pop("engine"))
        _replay(request, deployment, out, force, **replay)
    else:
        for name, value in replay.items():
            if value:
                raise UserError(
                    name.replace("_", "-"), value, "applies to the real engine only; leave it out with --url"
                )
        _send(request, requested(BenchTarget, target), out, force, deployment_file, given)


def _deployed(file: str | None, flags: dict[str, Any], replicas: int | None, router: str | None) -> Deployment:
    """Return the deployment of the file and the flags, with a fleet if replicas or a router are given."""
    from tokentwin.planning.priced_scenario import with_fleet

    deployment = read_deployment(file, flags)
    if replicas is None and router is None:
        return deployment
    return with_fleet(deployment, replicas, router)


def _send(
    request: Offered, target: BenchTarget, out: str, force: bool, deployment_file: str | None, flags: dict[str, Any]
) -> None:
    from tokentwin.planning.pooling import refuse_pooling
    from tokentwin.planning.progress import counting
    from tokentwin.run_table import print_metrics, print_reasons
    from tokentwin.serving.errors import UserError
    from tokentwin.traces.metrics.run_metrics import RunMetrics
    from tokentwin.traces.recording import Recording

    try:
        from tokentwin.planning.bench.client import bench as send
    except ModuleNotFoundError:
        raise UserError("aiohttp", None, "is not installed; pip install 'tokentwin[server]'") from None
    model = flags.pop("model")
    if not deployment_file and (stated := next((name for name, value in flags.items() if value is not None), None)):
        remedy = "describes the server's deployment; also give --deployment, or leave it out"
        raise UserError(stated.replace("_", "-"), flags[stated], remedy)
    deployment = read_deployment(deployment_file, flags) if deployment_file else None
    workload = request.workload()
    refuse_pooling(workload, "bench --url")
    with counting("sending", len(list(workload.requests))) as advance:
        status = send(
            workload,
            target,
            out,
            model=model,
            deployment=deployment,
            overwrite=force,
            say=partial(click.echo, err=True),
            progress=advance,
        )
    recording = Recording.load(out)
    metrics = RunMetrics.from_recording(recording)
    print_metrics(metrics, "table")
    print_reasons(recording)
    late = metrics.distribution("send_delay_ms")
    click.echo(
        f"requests were sent {late.p50:.1f} ms late (median; p99 {late.p99:.1f} ms); latencies include this delay"
    )
    click.echo(f"{status}: recorded in {out}")
    if status != "complete":
        raise SystemExit(130)


def _replay(
    request: Offered,
    deployment: Deployment,
    out: str,
    force: bool,
    *,
    minutes: float | None,
    virtual_arrivals: bool,
    time_operations: bool,
) -> None:
    from tokentwin.run_table import print_reasons
    from tokentwin.traces.recording import Recording

    workload = request.workload()

    from tokentwin.planning.measure.real_engine import check_replays, fitting, load_engines, record_run, runs_on_vllm
    from tokentwin.planning.measure.vllm_engine import VllmEngine
    from tokentwin.serving.errors import UserError

    say = partial(click.echo, err=True)
    if time_operations and runs_on_vllm(deployment):
        raise UserError("time-operations", None, "works only with our own engine; leave it out with vLLM")
    check_replays(workload, deployment, [Path(out)], force)
    with closing(load_engines(deployment, say)) as engine:
        from tokentwin.realengine.offered_workload import at_once

        if time_operations and not isinstance(engine, VllmEngine):
            engine.time_operations()
        offered = fitting(at_once(workload) if virtual_arrivals else workload, engine, minutes, say)
        done = record_run(offered, engine, Path(out), force, "replaying")
    click.echo(
        f"{done.status}: {done.finished}/{done.requests} requests in {done.duration_ns / 1e9:.1f} s, recorded in {out}"
    )
    print_reasons(Recording.load(out))
    if done.status != "complete":
        raise SystemExit(130)
