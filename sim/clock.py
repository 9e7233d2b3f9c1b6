"""Order on the virtual clock.

Events at one timestamp happen in a stated order: steps end (by replica), then transfers of KV, then the fleet changes,
then requests arrive or are given up, then schedulers plan. SimPy orders equal times by priority, then by age, so the
same input gives the same run on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import simpy
from simpy.core import EmptySchedule

STEP_ENDS = 0  # plus the index of the replica
TRANSFER_ENDS, FLEET, ARRIVAL, PLANNING = range(1 << 40, (1 << 40) + 4)
SECOND_NS = 1_000_000_000


class VirtualClock(simpy.Environment):
    """SimPy's environment, in integer nanoseconds, on which nothing but alarms happens."""

    @property
    def now_ns(self) -> int:
        return self._now  # type: ignore[return-value]  # only integers are ever scheduled

    def step(self) -> None:
        """The next alarm goes off. Raises EmptySchedule if there is none."""
        try:
            self._now, _, _, alarm = heappop(self._queue)
        except IndexError:
            raise EmptySchedule from None
        alarm.callback(alarm)  # type: ignore[attr-defined]


class Alarm:
    """Calls `callback(alarm)` at `at_ns`. One that is no longer wanted is simply not recognised.

    SimPy's events can fail, be waited for by several and hold a value; there are six of these to a request, and all
    that they need is their place in the queue.
    """

    __slots__ = ("callback",)

    def __init__(self, clock: VirtualClock, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self.callback = callback
        heappush(clock._queue, (at_ns, order, next(clock._eid), self))  # type: ignore[misc]


def from_seconds(seconds: float) -> int:
    """Nanoseconds."""
    return round(seconds * SECOND_NS)
