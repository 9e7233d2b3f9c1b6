"""Starts the processes of a server, starts again what dies, and ends them in order."""

from __future__ import annotations

import logging
import signal
import socket
import tempfile
from collections.abc import Callable
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

from apiserver.processes import api_main, engine_main
from apiserver.served_fleet import served_fleet
from apiserver.settings import ServeSettings
from serving.deployments.config import Deployment
from serving.errors import UserError, reason

_LOG = logging.getLogger("tokentwin")
_YOUNG_S = 10.0  # a process that dies younger than this would only die again
_LOOK_S = 0.5  # how often it looks whether it was asked to stop
_END_S = 5.0
_ENGINE = "engine"
_SPAWN = get_context("spawn")


def serve(
    settings: ServeSettings,
    deployment: Deployment,
    out: str | None = None,
    overwrite: bool = False,
    ready: Callable[[str, list[str]], None] = lambda model, urls: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, and then until every request under way has ended; a second one ends it at once.

    `ready` is called with the model's name and the URLs of the server, or of each replica. Raises UserError for what
    cannot be served, and for an address that cannot be listened on.
    """
    if settings.twin:
        deployment = served_fleet(settings, deployment)
    fleet, listening = deployment.fleet, []
    ports = len(fleet.pools) if settings.ports_per_replica and fleet is not None else 1
    try:
        for at in range(ports):
            listening.append(_listen(settings.host, settings.port + at if settings.port else 0))
        addresses = [port.getsockname()[:2] for port in listening]
        settings = settings.model_copy(update={"port": addresses[0][1]})
        with tempfile.TemporaryDirectory(prefix="tokentwin-") as folder:
            address = f"ipc://{Path(folder) / 'engine'}"
            supervisor = _Supervisor(settings, deployment, out, overwrite, address, listening)
            try:
                model = supervisor.start()
                ready(model, [_url(*address) for address in addresses])
                supervisor.watch()
            finally:
                supervisor.end()
    finally:
        for port in listening:
            port.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError("port", f"{host}:{port}", f"cannot be listened on: {reason(error)}; give another") from None
    return listening


class _Supervisor:
    def __init__(
        self,
        settings: ServeSettings,
        deployment: Deployment,
        out: str | None,
        overwrite: bool,
        address: str,
        listening: list[socket.socket],
    ) -> None:
        self._settings = settings
        self._engine_of = (settings, deployment, out, overwrite, address)
        self._address = address
        self._listening = listening
        self._processes: dict[str, BaseProcess] = {}
        self._born: dict[str, float] = {}
        self._stops = 0

    def start(self) -> str:
        """Start everything; the name of the model that is served."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        model = self._start_engine()
        for at in range(self._settings.api_workers):
            self._start_api(f"api-{at}")
        return model

    def watch(self) -> None:
        """Until everything has ended."""
        while not self._stops:
            connection.wait([process.sentinel for process in self._processes.values()], timeout=_LOOK_S)
            for name, process in list(self._processes.items()):
                if process.exitcode is not None and not self._stops:
                    self._start_again(name, process)
        engine, told = self._processes[_ENGINE], 0
        while engine.exitcode is None:
            if told < self._stops:
                told = self._stops
                engine.terminate()
            engine.join(_LOOK_S)

    def end(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(_END_S)
            process.kill()

    def _stop(self, number: int, frame: Any) -> None:
        self._stops += 1

    def _start_again(self, name: str, process: BaseProcess) -> None:
        """Raises UserError if it would only die again."""
        if monotonic() - self._born[name] < _YOUNG_S:
            remedy = "has ended as soon as it was started; the lines above say why"
            raise UserError(f"process {name}", f"exit code {process.exitcode}", remedy)
        _LOG.error("the process %s has ended (exit code %s); it is started again", name, process.exitcode)
        if name == _ENGINE:
            self._start_engine()
        else:
            self._start_api(name)

    def _start_engine(self) -> str:
        told, tells = _SPAWN.Pipe(duplex=False)
        process = self._start(_ENGINE, engine_main, *self._engine_of, tells)
        tells.close()
        try:
            what, text = told.recv()
        except EOFError:
            process.join()
            remedy = "has ended before it could serve; the lines above say why"
            raise UserError("the engine process", f"exit code {process.exitcode}", remedy) from None
        if what == "cannot":
            raise UserError(*text)
        return str(text)

    def _start_api(self, name: str) -> None:
        self._start(name, api_main, self._settings, self._address, name, self._listening)

    def _start(self, name: str, main: Callable[..., None], *args: Any) -> BaseProcess:
        process = self._processes[name] = _SPAWN.Process(target=main, args=args, name=name)
        process.start()
        self._born[name] = monotonic()
        return process
