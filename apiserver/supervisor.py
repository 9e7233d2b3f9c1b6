"""The supervisor of a server, which starts its processes, restarts a process that dies, and ends all in order."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from tokentwin.apiserver.certificate import tls_context
from tokentwin.apiserver.openai_api.api_keys import read_keys
from tokentwin.apiserver.openai_api.given_answers import read_answers
from tokentwin.apiserver.processes import Engine, api_main, engine_main
from tokentwin.apiserver.served_fleet import served_fleet
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError, reason
from tokentwin.traces.live_recording import Place

_YOUNG_S = 10.0  # a process that ends sooner than this has died young
_MOST_YOUNG = 3  # number of young deaths in a row after which a process is not started again
_LOOK_S = 0.5  # interval at which the supervisor checks whether it must stop
_END_S = 5.0
_AT_ONCE_S = 10.0  # time that the engine may take to end after the second signal, as when a policy hangs
_TRIES = 100  # number of attempts to find consecutive free ports
_ENGINE = "engine"
_SPAWN = get_context("spawn")


def serve(
    settings: ServeSettings,
    deployment: Deployment,
    out: str | None = None,
    overwrite: bool = False,
    ready: Callable[[str, list[str]], None] = lambda model, urls: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests under way; a second signal ends the server at once.

    `ready` is called with the model's name and the URL of the server or the URLs of all replicas. `say` is called with
    a line of text when a process is restarted and when the server begins to end. Raises UserError if the deployment
    cannot be served, or if the server cannot listen on an address.
    """
    read_keys(settings.api_key_file)
    read_answers(settings.answers)  # raise the error before any process starts
    scheme = "http" if tls_context(settings.tls_cert, settings.tls_key) is None else "https"
    if settings.twin:
        deployment = served_fleet(settings, deployment)
    ports = len(deployment.fleet.pools) if settings.ports_per_replica and deployment.fleet is not None else 1
    listening = _ports_in_a_row(settings.host, settings.port, ports)
    try:
        addresses = [port.getsockname()[:2] for port in listening]
        settings = settings.model_copy(update={"port": addresses[0][1]})
        with tempfile.TemporaryDirectory(prefix="tokentwin-") as folder:
            engine = Engine(settings, deployment, Place(out, overwrite), f"ipc://{folder}/{_ENGINE}")
            supervisor = _Supervisor(engine, listening, say)
            try:
                if model := supervisor.start():
                    ready(model, [_url(scheme, *address) for address in addresses])
                    supervisor.watch()
            finally:
                supervisor.end()
    finally:
        for port in listening:
            port.close()


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _ports_in_a_row(host: str, port: int, count: int) -> list[socket.socket]:
    """Take `count` ports from `port` upwards; 0 chooses free ports. Raises UserError if a port is not free."""
    for tries_left in reversed(range(_TRIES if port == 0 else 1)):
        listening = [_bound(host, port)]
        first: int = listening[0].getsockname()[1]
        try:
            listening += (_bound(host, first + at) for at in range(1, count))
        except UserError:
            for taken in listening:
                taken.close()
            if not tries_left:
                raise
        else:
            break
    return listening


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise _not_listening(f"{host}:{port}", error) from None
    return listening


def _accept_connections(listening: list[socket.socket]) -> None:
    """Accept connections on the ports; processes that serve HTTP have begun to. Raises UserError if a port is taken."""
    for port in listening:
        try:
            port.listen(1024)
        except OSError as error:
            raise _not_listening("{}:{}".format(*port.getsockname()), error) from None


def _not_listening(address: str, error: Exception) -> UserError:
    return UserError("port", address, f"cannot be listened on: {reason(error)}; give another")


class _Supervisor:
    def __init__(self, engine: Engine, listening: list[socket.socket], say: Callable[[str], None]) -> None:
        self._engine = engine
        self._say = say
        self._listening = listening
        self._processes: dict[str, BaseProcess] = {}
        self._orders: dict[str, Connection] = {}
        self._born: dict[str, float] = {}
        self._died_young: dict[str, int] = {}
        self._stops = 0

    def start(self) -> str:
        """Start all processes; return the name of the served model, or "" if a signal came before it served."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        model = self._await_engine(self._start_engine())
        if model:
            begun = [self._start_api(f"api-{at}") for at in range(self._engine.settings.api_workers)]
            while begun and not self._stops:
                begun = [one for one in begun if not one.poll(_LOOK_S)]
            _accept_connections(self._listening)
        return model

    def watch(self) -> None:
        """Restart processes that die until a signal comes; then return when the engine process has ended."""
        while not self._stops:
            wait([process.sentinel for process in self._processes.values()], timeout=_LOOK_S)
            for name, process in list(self._processes.items()):
                if process.exitcode is not None and not self._stops:
                    self._start_again(name, process)
        self._say("the server ends when the requests under way have ended; a second Ctrl-C ends it at once")
        engine, orders = self._processes[_ENGINE], self._orders[_ENGINE]
        with suppress(OSError):  # the process has just ended
            orders.send_bytes(b"end")
            while self._stops == 1 and engine.exitcode is None:
                engine.join(_LOOK_S)
            orders.send_bytes(b"end")
            engine.join(_AT_ONCE_S)

    def end(self) -> None:
        """End the processes that still run."""
        for orders in self._orders.values():
            orders.close()
        for process in self._processes.values():
            process.join(_END_S)
            process.kill()

    def _stop(self, number: int, frame: Any) -> None:
        self._stops += 1

    def _start_again(self, name: str, process: BaseProcess) -> None:
        """Restart a process. Raises UserError if it has died young too often in a row."""
        young = monotonic() - self._born[name] < _YOUNG_S
        self._died_young[name] = self._died_young.get(name, 0) + 1 if young else 0
        if self._died_young[name] == _MOST_YOUNG:
            remedy = f"has ended {_MOST_YOUNG} times as soon as it was started; the lines above say why"
            raise UserError(f"process {name}", f"exit code {process.exitcode}", remedy)
        self._say(f"the process {name} has ended (exit code {process.exitcode}); it is started again")
        if name == _ENGINE:
            self._engine = self._engine._replace(place=self._engine.place._replace(again=True))
            self._await_engine(self._start_engine())
        else:
            self._start_api(name)

    def _start_engine(self) -> Connection:
        receiver, sender = _SPAWN.Pipe(duplex=False)
        self._start(_ENGINE, engine_main, self._engine, sender)
        sender.close()
        return receiver

    def _await_engine(self, receiver: Connection) -> str:
        """Wait until the engine process serves; return the name of its model, or "" after a signal.

        Raises UserError if the process cannot serve.
        """
        while not receiver.poll(_LOOK_S):
            if self._stops:
                return ""
        try:
            what, text = receiver.recv()
        except EOFError:
            if self._stops:
                return ""
            self._processes[_ENGINE].join()
            remedy = "has ended before it could serve; the lines above say why"
            raise UserError(f"process {_ENGINE}", f"exit code {self._processes[_ENGINE].exitcode}", remedy) from None
        if what == "cannot":
            raise UserError(*text)
        return str(text)

    def _start_api(self, name: str) -> Connection:
        """Start a process that handles HTTP; the connection that is returned ends when it serves, or has ended."""
        receiver, sender = _SPAWN.Pipe(duplex=False)
        self._start(name, api_main, self._engine.settings, self._engine.address, name, self._listening, sender)
        sender.close()
        return receiver

    def _start(self, name: str, main: Callable[..., None], *args: Any) -> None:
        if name in self._orders:
            self._orders[name].close()
        taken, self._orders[name] = _SPAWN.Pipe(duplex=False)
        self._processes[name] = _SPAWN.Process(target=main, args=(*args, taken), name=name)
        self._processes[name].start()
        taken.close()
        self._born[name] = monotonic()
