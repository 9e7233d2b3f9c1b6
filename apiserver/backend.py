"""The interface of what schedules requests behind the exchange: a real engine, or a fleet's twin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from apiserver.live_metrics import ReplicaNow
from apiserver.messages import About, Add


class Backend(Protocol):
    """An engine or a twin: it takes requests by their ids in the exchange, and gives their tokens to the exchange.

    Attributes:
        about: description of the served model
        add: take a new request; the exchange's `give` and `end` carry its answer
        refusal: HTTP status and reason for which a request is refused before it is added; None if it is accepted
        abort: give up a request because of a stop string (`stop`), or because its client is gone
        turn: hand out new tokens; return the seconds until the next turn, None if something wakes the poller
        run_ns: convert a time of the monotonic clock to the run's own time; `monotonic_ns` converts back
        replicas: the replicas that are alive
        close: end the run, and hand on the last rows
    """

    about: About

    def add(self, id: int, asked: Add) -> None: ...
    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None: ...
    def abort(self, id: int, why: str) -> None: ...
    def turn(self) -> float | None: ...
    def run_ns(self, monotonic_ns: int) -> int: ...
    def monotonic_ns(self, run_ns: int) -> int: ...
    def replicas(self) -> Iterable[ReplicaNow]: ...
    def close(self) -> None: ...
