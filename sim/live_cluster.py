"""A fleet whose requests come while it runs: whoever drives it says what time it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from serving.errors import UserError
from serving.workload import WorkloadRequest
from sim.clock import ARRIVAL, Alarm
from sim.cluster import Cluster, Simulated
from sim.fleet import Life


class LiveCluster(Cluster):
    """A `Cluster` without a workload. What comes at one time is taken in together, as from a trace that says so.

    A run that offers the same requests at the same times decides the same.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._begin()

    @property
    def next_ns(self) -> float:
        """When something happens next of its own accord; infinite if nothing will."""
        return self._clock.peek()

    def advance(self, to_ns: int, *arrivals: Callable[[], None]) -> None:
        """Let everything happen that is due by `to_ns`, and `arrivals` then: calls of `offer` and `give_up`.

        Raises UserError if a policy breaks its contract, and if `to_ns` has been reached before.
        """
        if arrivals:
            self._until(to_ns - 1)
            Alarm(self._clock, to_ns, ARRIVAL, lambda _: _all(arrivals))
        self._until(to_ns)

    def offer(self, request: WorkloadRequest) -> None:
        """`request` arrives now."""
        self._gateway.offer(request)

    def give_up(self, id: int, status: str, reason: str) -> None:
        """The client of request `id` goes away now, which `status` and `reason` say in the recording."""
        self._gateway.give_up(id, status, reason)

    def follow(self, ready: Callable[[Life], None], gone: Callable[[Life], None]) -> None:
        """Call `ready` with each replica that takes requests, those that do already first, and `gone` when it ends."""
        for pool in range(len(self._fleet.pools)):
            for life in self._fleet.living(pool):
                if life.serves:
                    ready(life)
        self._fleet.on_ready.append(ready)
        self._fleet.on_gone.append(gone)

    def finish(self) -> Simulated:
        """What has not ended is given up; the last rows go to the sink."""
        for id in self._gateway.open_requests():
            self._gateway.give_up(id, "unfinished", "the server ended")
        return self._end()

    def _until(self, to_ns: int) -> None:
        clock = self._clock
        if clock.now_ns > to_ns:
            raise UserError("to_ns", to_ns, "has passed already; time only goes on")
        with self._fleet.watch.on():
            while clock.peek() <= to_ns:
                clock.step()

    def _left(self, request: WorkloadRequest) -> None:
        """Nobody waits for the end of a request to send another."""


def _all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
