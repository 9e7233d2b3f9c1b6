"""The engine's loop in real time: take new arrivals, launch steps while there is room, finish the oldest step."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Protocol

from tokentwin.realengine.engine import Engine
from tokentwin.realengine.run_recorder import RunRecorder
from tokentwin.realengine.step import Step

# interval for checking whether KV has been copied or a wait has ended, because nothing notifies the loop
_LOOK_S = 1e-4


class Clientele(Protocol):
    """The senders of requests to a running engine.

    Attributes:
        busy: True if a client waits for an answer, or will send a request
        take: give new arrivals to the engine, and abort requests whose clients no longer wait
        ran: called when a step has ended and the requests in it have their tokens
        await_: called when there is nothing to run; returns when something has arrived or when `stopped()` is True
    """

    @property
    def busy(self) -> bool: ...
    def take(self) -> None: ...
    def ran(self, step: Step) -> None: ...
    def await_(self, stopped: Callable[[], bool]) -> None: ...


def drive(engine: Engine, clients: Clientele, recorder: RunRecorder, stopped: Callable[[], bool]) -> None:
    """Run steps until `clients` are no longer busy or `stopped()` is True, and finish the steps launched by then."""
    while clients.busy and not stopped():
        clients.take()
        if engine.has_room and (flight := engine.launch()):
            recorder.planned(flight)
            if engine.has_room:
                continue  # there is room for another step; first take new arrivals, which may join it
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
