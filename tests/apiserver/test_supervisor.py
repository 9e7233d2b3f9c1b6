"""A server that is to end does end: before it serves, and with an engine that hangs."""

import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tokentwin.apiserver import supervisor as module
from tokentwin.apiserver.processes import Engine
from tokentwin.apiserver.settings import ServeSettings
from tokentwin.apiserver.supervisor import _Supervisor
from tokentwin.serving.deployments.config import Deployment
from tokentwin.traces.live_recording import Place


def test_a_model_that_still_loads_is_not_waited_for_once_the_server_is_to_end(tmp_path: Path) -> None:
    engine = Engine(ServeSettings(), Deployment(), Place(None), f"ipc://{tmp_path}/engine")
    supervisor = _Supervisor(engine, [], print)
    told, _tells = Pipe(duplex=False)
    supervisor._stop(15, None)
    assert supervisor._await_engine(told) == ""


def hang(taken: object) -> None:
    time.sleep(1e6)


def test_an_engine_that_hangs_is_killed_after_the_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE_S", 0.0)
    monkeypatch.setattr(module, "_END_S", 0.0)
    engine = Engine(ServeSettings(), Deployment(), Place(None), f"ipc://{tmp_path}/engine")
    supervisor = _Supervisor(engine, [], print)
    supervisor._start("engine", hang)
    process = supervisor._processes["engine"]
    supervisor._stop(2, None)
    supervisor._stop(2, None)
    supervisor.watch()
    supervisor.end()
    process.join(30)
    assert process.exitcode == -9
