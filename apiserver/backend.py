"""The interface of a backend, which schedules the requests of a server: real engines or the twin of a fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tokentwin.apiserver.live_metrics import ReplicaNow
from tokentwin.apiserver.messages import About, Add


class Backend(Protocol):
    """A backend. It takes requests with their ids in the exchange, and gives their tokens to the exchange.

    Attributes:
        about: description of the served model
        add: take a new request; the exchange's `give` and `end` carry its answer
        refusal: return the HTTP status and the reason if a request must be refused before it is added; else None
        plant: replace the failures of requests by a JSON document of `RequestFailures` (empty: keep them), and return
            the present ones; a real backend returns empty text
        abort: abort a request; `why` is `stop` if a stop string has ended the answer, else the reason why its client is
            gone
        turn: hand out new tokens; return the seconds until the next call, or None if the poller wakes when there is
            news
        run_ns: convert a time on the monotonic clock to a time of the run; `monotonic_ns` converts back
        replicas: return the replicas that are alive
        rest: drop the KV cache, if the level of the sleep is at least 1, and return the seconds until the weights have
            left the device; no request is under way
        moves_s: return the seconds in which the weights move to the device after a sleep of this level
        well: return False if an engine was stopped, so that it answers nothing
        close: end the run, and give the last rows to the ledger
    """

    about: About

    def add(self, id: int, asked: Add) -> None: ...
    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None: ...
    def plant(self, failures: str) -> str: ...
    def abort(self, id: int, why: str) -> None: ...
    def turn(self) -> float | None: ...
    def run_ns(self, monotonic_ns: int) -> int: ...
    def monotonic_ns(self, run_ns: int) -> int: ...
    def replicas(self) -> Iterable[ReplicaNow]: ...
    def rest(self, level: int) -> float: ...
    def moves_s(self, level: int) -> float: ...
    def well(self) -> bool: ...
    def close(self) -> None: ...
