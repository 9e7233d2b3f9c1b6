"""The virtual clock, and the order of its events.

Events at one timestamp happen in a stated order: steps end (by replica), then transfers of KV, then the fleet changes,
then requests arrive or are given up, then schedulers plan. SimPy orders equal times by priority, then by age, so the
same input gives the same run on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy.core
from mypy_extensions import mypyc_attr

STEP_ENDS = 0  # plus the index of the replica
TRANSFER_ENDS, FLEET, ARRIVAL, PLANNING = range(1 << 40, (1 << 40) + 4)
SECOND_NS = 1_000_000_000


@mypyc_attr(native_class=False)
class VirtualClock(simpy.core.Environment):
    """SimPy's environment, in integer nanoseconds. Alarms, which are nearly all events, take a short way."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def step(self) -> None:
        """Take the next event; see `simpy.Environment.step`."""
        queue: list[Any] = self._queue
        if not queue or not isinstance(queue[0][3], Alarm):
            super().step()
            self.now_ns = int(self._now)
            return
        at_ns, _, _, alarm = heappop(queue)
        self._now = self.now_ns = at_ns
        alarm.callback(alarm)


class Alarm:
    """An alarm that calls `callback(alarm)` at `at_ns`. A callback ignores an alarm that is no longer wanted."""

    __slots__ = ("callback",)

    def __init__(self, clock: VirtualClock, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self.callback = callback
        queue: list[Any] = clock._queue
        heappush(queue, (at_ns, order, next(clock._eid), self))


def from_seconds(seconds: float) -> int:
    return round(seconds * SECOND_NS)
