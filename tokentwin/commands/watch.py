"""`tokentwin watch`: does a server still behave as its twin?"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from planning.bench.request import BenchTarget
from tokentwin.options import Finite, options_of, requested

DRIFTED = 3
options = options_of(BenchTarget)


@click.command()
@options("--url")
@click.option("--twin", required=True, type=click.Path(path_type=Path), help="Folder that `tokentwin learn` wrote.")
@click.option("--every", type=Finite(min=0.1), help="Look again every so many minutes, until Ctrl-C.")
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path),
    help="Also write the changes to this file, for the textfile collector of Prometheus's node exporter.",
)
@click.option("--model-name", help="Name of the model on the server, if not the first that it lists.")
@options("--endpoint")
@options_of(BenchTarget, envvar="TOKENTWIN_API_KEY", show_envvar=True)("--api-key")
@options("--timeout-s --vocab-size")
def watch(twin: Path, every: float | None, metrics_file: Path | None, model_name: str | None, **given: Any) -> None:
    """Look whether a server still behaves as its twin, and which layer has changed.

    One look sends 29 short requests, at most 16 at a time. It compares the times of decode steps, of prefills and of
    the API server with the twin's, and prefix caching and KV blocks with its settings. A change is reported when a
    second look sees it, too.

    The exit status is 0 if the server behaves as its twin, and 3 if it has changed. With --every the command goes on,
    and the last look is in the twin's folder.

    \b
      tokentwin watch --url http://localhost:8000 --twin my-twin
    """
    from serving.answers.terminal import print_report
    from serving.errors import UserError

    try:
        from planning.learn.http_server import HttpServer
    except ModuleNotFoundError:
        raise UserError("aiohttp", None, "is not installed; pip install 'tokentwin[server]'") from None
    from planning.learn.watch import KeptTwin, WatchedServer, keep, look

    target, kept = requested(BenchTarget, given), KeptTwin.load(twin)

    def looked() -> WatchedServer:
        with tempfile.TemporaryDirectory() as answers:
            server = HttpServer(target, Path(answers), model_name)
            return look(kept, server, server.reported())

    while True:
        seen = looked()
        if seen.drifted:
            again = looked()
            seen = seen if {one.layer for one in seen.drifted} & {one.layer for one in again.drifted} else again
        keep(twin, seen, metrics_file)
        if every is None:
            print_report(seen.report())
            raise SystemExit(DRIFTED if seen.drifted else 0)
        click.echo(f"{seen.at}: {seen.headline()}")
        time.sleep(60 * every)
