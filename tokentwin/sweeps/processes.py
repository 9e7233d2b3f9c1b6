"""Runs in processes of this machine: one pipe to each, one run at a time down each pipe.

A pool of the standard library is broken for good when one of its processes dies; here only the run in it is lost. The
processes are deaf to Ctrl-C, which is for their parent to answer, and end when it is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, cast

from tokentwin.sweeps.executors import DIED
from tokentwin.sweeps.one_run import Outcome, failed
from tokentwin.sweeps.points import Point

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

_SPAWN = get_context("spawn")
_LOST = (EOFError, OSError)


class Processes:
    """At most `jobs` processes, by default one for each CPU that this process may use."""

    def __init__(self, jobs: int | None = None) -> None:
        self._jobs = jobs or len(os.sched_getaffinity(0))

    def run(self, measure: Callable[[Point], Outcome], points: Sequence[Point]) -> Generator[Outcome, None, None]:
        """See `Executor`."""
        left = iter(points)
        busy: dict[Connection, tuple[SpawnProcess, Point]] = {}
        try:
            for _, point in zip(range(self._jobs), left, strict=False):
                _give(busy, *_started(measure), point)
            while busy:
                for ready in wait(list(busy)):
                    connection = cast(Connection, ready)
                    process, point = busy.pop(connection)
                    try:
                        yield connection.recv()
                    except _LOST:
                        _end(connection, process)
                        yield failed(point, DIED)
                        connection, process = _started(measure)
                    following = next(left, None)
                    if following is None:
                        _end(connection, process)
                    else:
                        _give(busy, connection, process, following)
        finally:
            for connection, (process, _) in busy.items():
                _end(connection, process)


def _give(
    busy: dict[Connection, tuple[SpawnProcess, Point]], connection: Connection, process: SpawnProcess, point: Point
) -> None:
    busy[connection] = process, point
    with suppress(*_LOST):  # a process that is gone is found out when it is waited for
        connection.send(point)


def _started(measure: Callable[[Point], Outcome]) -> tuple[Connection, SpawnProcess]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(measure, theirs), daemon=True)
    resource_tracker.ensure_running()  # which start() would do, and thereby unblock the signal
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # and so for good in the child
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    theirs.close()
    return ours, process


def _end(connection: Connection, process: SpawnProcess) -> None:
    connection.close()
    process.terminate()
    process.join()


def _serve(measure: Callable[[Point], Outcome], connection: Connection) -> None:
    with suppress(*_LOST):
        while True:
            connection.send(measure(connection.recv()))
