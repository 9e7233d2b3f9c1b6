"""The main functions of a server's processes: the engine process, and the processes that handle HTTP."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from time import sleep
from typing import NamedTuple

from tokentwin.apiserver.log import LOG, log_to_stderr
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.call_limit import print_error, watch
from tokentwin.traces.live_recording import Place

_WAKE = "inproc://wake"
_ENGINE_S = 5.0  # time that an HTTP process waits for an engine before it starts to answer without one
_YOUNG_OBJECTS = 10_000  # number of new objects after which garbage is collected: a step's tokens make thousands
_END_S = 5.0  # time in which a process must end when its supervisor is gone


class Engine(NamedTuple):
    """The settings of an engine process, and its ZeroMQ address.

    Attributes:
        place: place to which the recording is written
    """

    settings: ServeSettings
    deployment: Deployment
    place: Place
    address: str


def engine_main(engine: Engine, reports: Connection, orders: Connection) -> None:
    """Run the engine process.

    It sends the name of its model to `reports` when it serves, or the reason why it cannot serve.
    """
    import zmq

    from tokentwin.apiserver import backends
    from tokentwin.apiserver.engine_process import EngineProcess
    from tokentwin.apiserver.exchange import Exchange
    from tokentwin.traces.without_pandas import spare_pandas

    spare_pandas()
    log_to_stderr()
    watch(print_error)
    settings, deployment, place = engine.settings, engine.deployment, engine.place
    process: EngineProcess | None = None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    woken, stops = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    woken.bind(_WAKE)
    stops.connect(_WAKE)

    def stop() -> None:
        if process is None:  # no client is served yet
            os._exit(1)
        process.stop()
        stops.send(b"")

    obey(orders, stop)
    exchange = Exchange(context, engine.address)
    poller = zmq.Poller()
    poller.register(woken, zmq.POLLIN)
    exchange.register(poller)
    make = backends.make_twin if settings.twin else backends.make_real
    try:
        backend, ledger, metrics = make(settings, deployment, place, exchange, poller)
        process = EngineProcess(backend, exchange, ledger, metrics, settings.max_requests)
        reports.send(("serves", backend.about.model))
        gc.disable()  # requests leave no reference cycles, and garbage collection would delay tokens
        process.run(poller, woken)
    except UserError as error:
        try:
            reports.send(("cannot", (error.field, error.value, error.remedy)))
        except BrokenPipeError:  # the engine already serves, and `reports` is no longer read
            LOG.error("%s", error)
        sys.exit(2)
    finally:
        exchange.close()


def api_main(
    settings: ServeSettings,
    address: str,
    name: str,
    listening: list[socket.socket],
    serves: Connection,
    orders: Connection,
) -> None:
    """Run a process that handles HTTP on each socket of `listening`; close `serves` when it does."""
    log_to_stderr()
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(_serve_http(settings, address, name, listening, serves, orders))


async def _serve_http(
    settings: ServeSettings,
    address: str,
    name: str,
    listening: list[socket.socket],
    serves: Connection,
    orders: Connection,
) -> None:
    from aiohttp import web

    from tokentwin.apiserver.certificate import follow_certificate, tls_context
    from tokentwin.apiserver.engine_client import EngineClient
    from tokentwin.apiserver.openai_api.api import Api, texts_of
    from tokentwin.apiserver.openai_api.api_keys import read_keys
    from tokentwin.apiserver.openai_api.bodies import Bodies
    from tokentwin.apiserver.openai_api.connection import listen
    from tokentwin.apiserver.openai_api.given_answers import read_answers

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stopped.set)

    obey(orders, stop)
    engine = EngineClient(address, name)
    tasks = engine.start()
    with suppress(TimeoutError):
        await asyncio.wait_for(engine.served.wait(), _ENGINE_S)
    keys, tls = read_keys(settings.api_key_file), tls_context(settings.tls_cert, settings.tls_key)
    bodies = Bodies(settings.body_limit, settings.client_timeout)
    timeout, tool_format, answers = settings.request_timeout, settings.tool_call_parser, read_answers(settings.answers)
    more = settings.enable_prompt_tokens_details, settings.enable_sleep_mode, settings.max_requests
    api = Api(engine, texts_of, bodies, timeout, keys, settings.hosts, tool_format, answers, *more)
    api.load_tokenizer()
    runners, servers = [], []
    for place, port in enumerate(listening):
        app = api.application(place if settings.ports_per_replica else None)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        servers.append(await listen(runner.server, settings.client_timeout, sock=port, ssl=tls))
        runners.append(runner)
    if tls is not None and settings.tls_cert is not None:
        tasks.append(asyncio.create_task(follow_certificate(tls, settings.tls_cert, settings.tls_key)))
    serves.close()
    gc.freeze()  # the objects made so far are kept
    gc.set_threshold(_YOUNG_OBJECTS)
    asked = asyncio.create_task(stopped.wait())
    ended, _ = await asyncio.wait([asked, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.close()
    await asyncio.gather(*[runner.cleanup() for runner in runners])
    for task in (asked, *tasks):
        task.cancel()
    for task in ended:
        task.result()  # raises the error of a task that talks to the engine; the supervisor then starts a new process


def obey(orders: Connection, stop: Callable[[], None]) -> None:
    """Call `stop` on another thread at each order of the supervisor; end the process when the supervisor is gone.

    When the supervisor has closed its end of the pipe or was killed, `stop` is called twice, and after 5 s the process
    is forced to exit. Signals are ignored, because only the supervisor handles them. A terminal, or a container that
    ends, sends signals to every process at once, but a process that handles HTTP must not end before the answers under
    way have ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def listen() -> None:
        try:
            while True:
                orders.recv_bytes()
                stop()
        except (EOFError, OSError):
            stop()
            stop()
        sleep(_END_S)
        os._exit(1)

    Thread(target=listen, name="orders", daemon=True).start()
