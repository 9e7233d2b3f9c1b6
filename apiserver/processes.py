"""The processes of a server: one that decides, some that speak HTTP. Each `main` here is one of them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from apiserver.settings import ServeSettings
from serving.deployments.config import Deployment
from serving.errors import UserError

_LOG = logging.getLogger("tokentwin")
_WAKE = "inproc://wake"


def engine_main(
    settings: ServeSettings, deployment: Deployment, out: str | None, overwrite: bool, address: str, told: Connection
) -> None:
    """The process that decides. It tells `told` its model's name when it serves, or why it cannot."""
    import zmq

    from apiserver.backends import make_real, make_twin
    from apiserver.engine_process import EngineProcess
    from apiserver.exchange import Exchange

    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the supervisor hands on what it means
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    woken, pokes, signals = context.socket(zmq.PULL), context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    woken.bind(_WAKE)
    pokes.connect(_WAKE)
    signals.connect(_WAKE)
    exchange = Exchange(context, address)
    poller = zmq.Poller()
    poller.register(woken, zmq.POLLIN)
    exchange.register(poller)
    try:
        if settings.twin:
            backend, ledger, metrics = make_twin(settings, deployment, out, overwrite, exchange, poller)
        else:
            wake = partial(pokes.send, b"")
            backend, ledger, metrics = make_real(settings, deployment, out, overwrite, exchange, wake, _LOG.info)
        process = EngineProcess(backend, exchange, ledger, metrics, settings.max_requests)

        def stop(number: int, frame: Any) -> None:
            process.stop()
            signals.send(b"")

        signal.signal(signal.SIGTERM, stop)
        told.send(("serves", backend.about.model))
        process.run(poller, woken)
    except UserError as error:
        told.send(("cannot", (error.field, error.value, error.remedy)))
        sys.exit(2)
    finally:
        exchange.close()


def api_main(settings: ServeSettings, address: str, name: str, listening: list[socket.socket]) -> None:
    """A process that speaks HTTP on each of `listening`."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_serve_http(settings, address, name, listening))


async def _serve_http(settings: ServeSettings, address: str, name: str, listening: list[socket.socket]) -> None:
    from aiohttp import web

    from apiserver.api import Api, texts_of
    from apiserver.engine_client import EngineClient

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    engine = EngineClient(address, name)
    tasks = engine.start()
    api = Api(engine, texts_of, settings.request_timeout)
    runners = []
    for place, port in enumerate(listening):
        app = api.application(settings.body_limit, place if settings.ports_per_replica else None)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, port, backlog=1024).start()
        runners.append(runner)
    await stopped.wait()
    await asyncio.gather(*[runner.cleanup() for runner in runners])
    for task in tasks:
        task.cancel()


def log_to_stderr() -> None:
    """Lines of this process go where those of the command do."""
    logging.basicConfig(stream=sys.stderr, format="tokentwin: %(message)s", level=logging.WARNING)
    _LOG.setLevel(logging.INFO)
