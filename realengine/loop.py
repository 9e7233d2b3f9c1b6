"""The engine's loop on real time: take what has arrived, launch while there is room, finish the oldest step."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Protocol

from realengine.engine import Engine
from realengine.run_recorder import RunRecorder
from realengine.step import Step

_LOOK_S = 1e-4  # interval for looking whether KV has come or a wait has ended, which no message says


class Clientele(Protocol):
    """The senders of requests to a running engine.

    Attributes:
        busy: whether anybody waits for an answer, or will
        take: give the engine new arrivals, and take from it requests that nobody waits for any more
        ran: called when a step has ended and the requests in it have their tokens
        await_: called when there is nothing to run: return when something has arrived, or `stopped` says so
    """

    @property
    def busy(self) -> bool: ...
    def take(self) -> None: ...
    def ran(self, step: Step) -> None: ...
    def await_(self, stopped: Callable[[], bool]) -> None: ...


def drive(engine: Engine, clients: Clientele, recorder: RunRecorder, stopped: Callable[[], bool]) -> None:
    """Run steps until `clients` are no longer busy, or `stopped` says so; steps launched by then are finished."""
    while clients.busy and not stopped():
        clients.take()
        if engine.has_room and (flight := engine.launch()):
            recorder.planned(flight)
            if engine.has_room:
                continue  # room for another step, which new arrivals may join
        if (step := engine.finish()) is not None:
            recorder.ran(step)
            clients.ran(step)
        elif engine.may_get_work:
            sleep(_LOOK_S)
        else:
            clients.await_(stopped)
    while stopped() and (step := engine.finish()) is not None:
        recorder.ran(step)
        clients.ran(step)
