"""The arrivals of clients' requests on the virtual clock: each request is offered when it is due."""

from __future__ import annotations

from collections.abc import Callable

from serving.clients import Clients
from serving.workload import WorkloadRequest
from sim.clock import ARRIVAL, Alarm, VirtualClock


class Arrivals:
    """The offers of the requests of `clients`. There is one alarm, for the next request that is due."""

    def __init__(self, clock: VirtualClock, clients: Clients, offer: Callable[[WorkloadRequest], None]) -> None:
        self._clock = clock
        self._clients = clients
        self._offer = offer
        self._alarm: Alarm | None = None
        self._alarm_ns = 0
        self._await_next()

    @property
    def exhausted(self) -> bool:
        """True once every request of the workload has been offered."""
        return self._clients.exhausted

    def ended(self, request: WorkloadRequest) -> None:
        """Record that `request` has left, now."""
        self._clients.ended(request, self._clock.now_ns)
        self._await_next()

    def _await_next(self) -> None:
        next_ns = self._clients.next_ns
        if next_ns is None or (self._alarm is not None and self._alarm_ns <= next_ns):
            return
        self._alarm_ns = max(next_ns, self._clock.now_ns)
        self._alarm = Alarm(self._clock, self._alarm_ns, ARRIVAL, self._release)

    def _release(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        now = self._clock.now_ns
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now:
            self._offer(self._clients.pop())
        self._alarm = None
        self._await_next()
