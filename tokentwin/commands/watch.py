"""`tokentwin watch`: does a server still behave as its twin?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import Finite, options_of, requested
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.learn.request import MetricsPage

if TYPE_CHECKING:
    from tokentwin.planning.learn.kept_twin import KeptTwin
    from tokentwin.planning.learn.watched import WatchedServer

DRIFTED = 3
_ASKING = ("model_name", "endpoint", "timeout_s", "vocab_size")  # options that only a look that sends requests has
options = options_of(BenchTarget, required=False)


@click.command()
@options("--url")
@options_of(MetricsPage, required=False)("--metrics --window")
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
def watch(twin: Path, every: float | None, metrics_file: Path | None, **given: Any) -> None:
    """Look whether a server still behaves as its twin, and which layer has changed.

    With --url, one look sends 29 short requests, at most 16 at a time. It compares the times of decode steps, of
    prefills and of the API server with the twin's, and prefix caching and KV blocks with its settings.

    With --metrics, a look sends nothing. It compares what the server's own users saw in the window: the mean times of
    decode steps, prefills, queueing and the API server, and the settings that the metrics state. If fewer than 20
    requests ended, it gives no verdict. With --every, a window begins where the last one ended.

    A change is reported when a second look sees it, too. The exit status is 0 if the server behaves as its twin, or
    without a verdict, and 3 if it has changed. With --every the command goes on, and the last verdict is in the twin's
    folder.

    \b
      tokentwin watch --url http://localhost:8000 --twin my-twin
      tokentwin watch --metrics http://localhost:8000 --twin my-twin
    """
    from tokentwin.planning.learn.kept_twin import KeptTwin
    from tokentwin.planning.learn.watched import keep
    from tokentwin.serving.answers.terminal import print_report
    from tokentwin.serving.errors import UserError

    looked = _looker(KeptTwin.load(twin), given)
    first = True
    while True:
        try:
            seen = _confirmed(looked)
        except UserError as error:
            if every is None or first:
                raise
            click.echo(str(error), err=True)  # a server that starts again answers later
        else:
            if seen.judged:
                keep(twin, seen, metrics_file)
            if every is None:
                print_report(seen.report())
                raise SystemExit(DRIFTED if seen.drifted else 0)
            click.echo(f"{seen.at}: {seen.headline()}")
        first = False
        time.sleep(60 * every)


def _confirmed(looked: Callable[[], WatchedServer]) -> WatchedServer:
    """Return a look; if it saw a change that a second look does not see, return the second."""
    seen = looked()
    if not seen.drifted:
        return seen
    again = looked()
    return seen if {one.layer for one in seen.drifted} & {one.layer for one in again.drifted} else again


def _looker(kept: KeptTwin, given: dict[str, Any]) -> Callable[[], WatchedServer]:
    """Return the function that looks at the server. Raises UserError if what is given does not go together."""
    from tokentwin.serving.errors import UserError

    if given["metrics"] is not None:
        from tokentwin.planning.learn.passive_look import PassiveWatch

        if given["url"] is not None:
            raise UserError("metrics", given["metrics"], "cannot be combined with --url; give one of them")
        for name in _ASKING:
            if given[name] is not None:
                raise UserError(name.replace("_", "-"), given[name], "needs --url; --metrics sends no requests")
        page = {name: given[name] for name in ("metrics", "window", "api_key")}
        return PassiveWatch(kept, requested(MetricsPage, page)).look
    if given["url"] is None:
        raise UserError("url", None, "is missing; give --url, or --metrics for a look that sends no requests")
    if given["window"] is not None:
        raise UserError("window", given["window"], "needs --metrics; --url looks as long as its questions take")
    try:
        from tokentwin.planning.learn.http_server import HttpServer
    except ModuleNotFoundError:
        raise UserError("aiohttp", None, "is not installed; pip install 'tokentwin[server]'") from None
    from tokentwin.planning.learn.watch import look

    target = requested(BenchTarget, {name: given[name] for name in BenchTarget.model_fields})

    def looked() -> WatchedServer:
        with tempfile.TemporaryDirectory() as answers:
            server = HttpServer(target, Path(answers), given["model_name"])
            return look(kept, server, server.reported())

    return looked
