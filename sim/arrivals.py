"""The arrivals of clients' requests on the virtual clock: each request is offered when it is due."""

from __future__ import annotations

from collections.abc import Callable

from simpy import Interrupt
from simpy.events import ProcessGenerator

from serving.clients import Clients
from serving.workload import WorkloadRequest
from sim.clock import ARRIVAL, VirtualClock

_NEVER = 1 << 62


class Arrivals:
    """The process that offers the requests of `clients`."""

    def __init__(self, clock: VirtualClock, clients: Clients, offer: Callable[[WorkloadRequest], None]) -> None:
        self._clock = clock
        self._clients = clients
        self._offer = offer
        self._waits_until_ns = 0
        self._process = clock.start(self._arrive())

    @property
    def exhausted(self) -> bool:
        """True once every request of the workload has been offered."""
        return self._clients.exhausted

    def ended(self, request: WorkloadRequest) -> None:
        """Record that `request` leaves now."""
        self._clients.ended(request, self._clock.now_ns)
        next_ns = self._clients.next_ns
        if next_ns is not None and next_ns < self._waits_until_ns:
            self._waits_until_ns = next_ns
            self._process.interrupt()

    def _arrive(self) -> ProcessGenerator:
        clock, clients = self._clock, self._clients
        next_ns = clients.next_ns
        while next_ns is not None or not clients.exhausted:
            self._waits_until_ns = _NEVER if next_ns is None else next_ns
            try:
                yield clock.event() if next_ns is None else clock.until(next_ns, ARRIVAL)
            except Interrupt:
                next_ns = clients.next_ns  # the end of a request made another request due earlier
                continue
            self._waits_until_ns = 0
            self._offer(clients.pop())
            while (next_ns := clients.next_ns) is not None and next_ns <= clock.now_ns:
                self._offer(clients.pop())
