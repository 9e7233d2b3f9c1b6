"""Order on the virtual clock.

Events at one timestamp happen in a stated order: steps end (by replica), then transfers of KV, then the fleet changes,
then requests arrive or are given up, then schedulers plan. SimPy orders equal times by priority, then by age, so the
same input gives the same run on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from operator import attrgetter

import simpy

STEP_ENDS = 0  # plus the index of the replica
TRANSFER_ENDS, FLEET, ARRIVAL, PLANNING = range(1 << 40, (1 << 40) + 4)
SECOND_NS = 1_000_000_000


class VirtualClock(simpy.Environment):
    """SimPy's environment, in integer nanoseconds."""

    now_ns: int = property(attrgetter("_now"))  # type: ignore[assignment]  # only integers are ever scheduled


class Alarm(simpy.Event):
    """Calls `callback(alarm)` at `at_ns`. One that is no longer wanted is simply not recognised."""

    _ok = True  # an event that has happened already, as simpy.Timeout makes itself
    _value = None

    def __init__(self, clock: VirtualClock, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self.env = clock
        self.callbacks = [callback]
        heappush(clock._queue, (at_ns, order, next(clock._eid), self))  # type: ignore[misc]  # priorities are integers


def from_seconds(seconds: float) -> int:
    return round(seconds * SECOND_NS)
