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
from apiserver.settings import ServeSettings
from serving.deployments.config import Deployment
from serving.errors import UserError, reason

_LOG = logging.getLogger("tokentwin")
_YOUNG_S = 10.0  # a process that dies younger than this would only die again
_DRAIN_S = 3600.0
_PROCESSES = get_context("spawn")


def serve(
    settings: ServeSettings,
    deployment: Deployment,
    out: str | None = None,
    overwrite: bool = False,
    ready: Callable[[str, str], None] = lambda model, url: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, and then until every request under way has ended; a second one ends it at once.

    `ready` is called with the model's name and the server's URL. Raises UserError for what cannot be served, and for an
    address that cannot be listened on.
    """
    listening = _listen(settings.host, settings.port)
    host, port = listening.getsockname()[:2]
    with tempfile.TemporaryDirectory(prefix="tokentwin-") as folder:
        supervisor = _Supervisor(settings, deployment, out, overwrite, f"ipc://{Path(folder) / 'engine'}", listening)
        try:
            model = supervisor.start()
            shown = f"[{host}]" if ":" in host else host
            ready(model, f"http://{shown}:{port}")
            supervisor.watch()
        finally:
            supervisor.end()
            listening.close()


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
        listening: socket.socket,
    ) -> None:
        self._settings = settings
        self._engine_of = (settings, deployment, out, overwrite, address)
        self._address = address
        self._listening = listening
        self._engine: BaseProcess | None = None
        self._apis: dict[str, BaseProcess] = {}
        self._born: dict[str, float] = {}
        self._stops = 0

    def start(self) -> str:
        """Start everything; the name of the model that is served."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        model = self._start_engine()
        for number in range(self._settings.api_workers):
            self._start_api(f"api-{number}")
        return model

    def watch(self) -> None:
        """Until everything has ended."""
        while not self._stops:
            died = connection.wait([self._engine.sentinel, *(api.sentinel for api in self._apis.values())], timeout=0.5)
            if self._stops or not died:
                continue
            if self._engine.exitcode is not None:
                self._hold("the engine process", "engine", self._engine)
                self._start_engine()
            for name, api in list(self._apis.items()):
                if api.exitcode is not None:
                    self._hold("an API process", name, api)
                    self._start_api(name)
        self._engine.terminate()
        until, stops = monotonic() + _DRAIN_S, self._stops
        while self._engine.exitcode is None and monotonic() < until:
            self._engine.join(0.2)
            if self._stops > stops:
                stops = self._stops
                self._engine.terminate()

    def end(self) -> None:
        """End what still runs."""
        for process in [*self._apis.values(), *([self._engine] if self._engine else [])]:
            if process.exitcode is None:
                process.terminate()
        for process in [*self._apis.values(), *([self._engine] if self._engine else [])]:
            process.join(5)
            process.kill()

    def _stop(self, number: int, frame: Any) -> None:
        self._stops += 1

    def _hold(self, what: str, name: str, process: BaseProcess) -> None:
        """Say that a process has died. Raises UserError if it would only die again."""
        if monotonic() - self._born[name] < _YOUNG_S:
            remedy = "has ended as soon as it was started; the lines above say why"
            raise UserError(what, f"exit code {process.exitcode}", remedy)
        _LOG.error("%s has ended (exit code %s); it is started again", what, process.exitcode)

    def _start_engine(self) -> str:
        told, tells = _PROCESSES.Pipe(duplex=False)
        self._engine = _PROCESSES.Process(target=engine_main, args=(*self._engine_of, tells), name="engine")
        self._engine.start()
        self._born["engine"] = monotonic()
        tells.close()
        try:
            what, text = told.recv()
        except EOFError:
            self._engine.join()
            remedy = "has ended before it could serve; the lines above say why"
            raise UserError("the engine process", f"exit code {self._engine.exitcode}", remedy) from None
        if what == "cannot":
            raise UserError(*text)
        return str(text)

    def _start_api(self, name: str) -> None:
        args = (self._settings, self._address, name, self._listening)
        self._apis[name] = _PROCESSES.Process(target=api_main, args=args, name=name)
        self._apis[name].start()
        self._born[name] = monotonic()
