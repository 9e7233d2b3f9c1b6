"""`tokentwin learn`: find out what a running server is, and make a twin of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from tokentwin.options import options_of, requested
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.deployments import read_deployment
from tokentwin.planning.learn.request import LearnRequest

options = options_of(LearnRequest)


@click.command()
@click.argument("traffic", metavar="[TRACE]", required=False, type=click.Path())
@options("--url --gpu")
@click.option(
    "-d", "--deployment", "deployment_file", type=click.Path(), required=True, help="Deployment of the server."
)
@options("--out --minutes --within-pct --max-concurrency --recorder --ignore-metrics --endpoint --model-name")
@options_of(BenchTarget, envvar="TOKENTWIN_API_KEY", show_envvar=True)("--api-key")
@options("--timeout-s --vocab-size")
@click.option("--force", is_flag=True, help="Replace a finished twin, from the answers that its directory holds.")
def learn(traffic: str | None, deployment_file: str, force: bool, **given: Any) -> None:
    """Find out what a running server is by asking it, and make a twin of it.

    The server is sent short designed loads, at most --minutes long in all and never more than --max-concurrency
    requests at a time. The next load is the one that narrows the prediction of your traffic most. From the times of the
    tokens the command infers how many equal engines there are, whose policy runs, the limits of its scheduler, its KV
    blocks and the time of its steps. Then the twin predicts traffic that taught it nothing: a part of TRACE, or two
    made-up loads. The server answers the same traffic, and the command prints both.

    The deployment file states what cannot be inferred: the model, its precision and parallelism. Settings that it
    states are taken as they are.

    If you press Ctrl-C, the same command goes on later with the answers that it has.

    \b
      tokentwin learn --url http://localhost:8000 --gpu H100 -d deployment.yaml -o my-twin
    """
    from tokentwin.serving.answers.terminal import print_report
    from tokentwin.serving.errors import UserError

    try:
        from tokentwin.planning.learn.http_server import Interrupted
        from tokentwin.planning.learn.session import learn as session
    except ModuleNotFoundError:
        raise UserError("aiohttp", None, "is not installed; pip install 'tokentwin[server]'") from None
    stated = {"deployment": read_deployment(deployment_file, {}), "traffic": traffic}
    request = requested(LearnRequest, given | stated)
    try:
        learnt = session(request, overwrite=force, say=partial(click.echo, err=True))
    except Interrupted:
        click.echo(f"interrupted: the answers are in {request.out}; the same command goes on", err=True)
        raise SystemExit(130) from None
    print_report(learnt.report())
    click.echo(f"saved in {request.out}")
