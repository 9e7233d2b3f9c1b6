"""Order on the virtual clock.

Events at one timestamp happen in a stated order: steps end, then requests arrive, then schedulers plan. SimPy
orders equal times by priority, then by age, so the same input gives the same run on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy

STEP_ENDS, ARRIVAL, PLANNING = 0, 1, 2  # SimPy's own timeouts have priority 1


class VirtualClock(simpy.Environment):
    """SimPy's environment, in integer nanoseconds."""

    @property
    def now_ns(self) -> int:
        return self._now  # type: ignore[return-value]  # only integers are ever scheduled


class Alarm(simpy.Event):
    """Calls `callback(alarm)` at `at_ns`. One that is no longer wanted is simply not recognised."""

    def __init__(self, clock: VirtualClock, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        # An event that has happened already, as simpy.Timeout makes itself.
        self.env = clock
        self.callbacks = [callback]
        self._ok = True
        self._value = None
        clock.schedule(self, order, at_ns - clock.now_ns)  # type: ignore[arg-type]
