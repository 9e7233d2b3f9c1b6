"""What decides, behind the exchange: a real engine, or a fleet's twin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from apiserver.live_metrics import ReplicaNow
from apiserver.messages import About, Add


class Backend(Protocol):
    """Takes requests by their ids in the exchange, and gives it their tokens.

    about     what is served
    add       a request has come; `answer` and `end` of it follow by the exchange
    refusal   why a request is refused, before it is added, and by which status of HTTP; None if it is not
    abort     nobody waits for the rest of a request: `stop`, or why its client is gone
    turn      hand out what there is; seconds until the next turn is wanted, None when something wakes the poller
    run_ns    the run's own time of a moment on the monotonic clock, which `monotonic_ns` turns back
    replicas  those that live
    close     end, and hand on the last rows
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
