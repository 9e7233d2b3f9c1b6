"""The virtual clock, and the order of its events.

Most activities are SimPy processes, which wait by `yield clock.until(at_ns)`. Only the steps of replicas, which are the
majority of events, are `Alarm`s, which are faster.

Events at one time happen in a fixed order. First steps end, in order of replicas; then KV transfers end; then the fleet
changes; then requests arrive or are given up; then schedulers plan. SimPy orders events of equal time by priority and
then by age, so equal inputs give equal runs on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, cast

import simpy.core
import simpy.events
from mypy_extensions import mypyc_attr

STEP_ENDS = 0  # plus the index of the replica
TRANSFER_ENDS, FLEET, ARRIVAL, PLANNING = range(1 << 40, (1 << 40) + 4)
SECOND_NS = 1_000_000_000


@mypyc_attr(native_class=False)
class VirtualClock(simpy.core.Environment):
    """SimPy's environment, in integer nanoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0

    def step(self) -> None:
        """Process the next event; see `simpy.Environment.step`."""
        queue: list[Any] = self._queue
        if not queue or not isinstance(queue[0][3], Alarm):
            if queue:
                self.now_ns = int(queue[0][0])  # set before the event runs, because processes read it
            super().step()
            return
        at_ns, _, _, alarm = heappop(queue)
        self._now = self.now_ns = at_ns
        alarm.callback(alarm)

    def start(self, generator: Generator[simpy.events.Event, Any, None]) -> simpy.events.Process:
        """Start a process now. An exception in the process is raised unchanged; SimPy would raise a copy."""
        process = self.process(generator)
        assert process.callbacks is not None
        process.callbacks.append(_raise_failure)
        return process

    def until(self, at_ns: int, order: int = FLEET) -> simpy.events.Event:
        """Return an event for which a process can wait: it happens at `at_ns`, or now if this time has passed.

        Among the events of that time, it comes after steps end and before requests arrive, unless `order` differs.
        """
        return Moment(self, at_ns if at_ns > self.now_ns else self.now_ns, order)


def _raise_failure(process: simpy.events.Event) -> None:
    if not process.ok:
        process.defused = True
        raise cast(BaseException, process.value)


@mypyc_attr(native_class=False)
class Moment(simpy.events.Event):
    """An event at a given time, with a given order among the events of that time.

    Like SimPy's Timeout it sets the fields of an Event itself, because there is one at every arrival.
    """

    def __init__(self, clock: VirtualClock, at_ns: int, order: int) -> None:
        self.env, self.callbacks = clock, []
        self._ok, self._value, self._defused = True, None, False
        clock.schedule(self, order, at_ns - clock.now_ns)  # type: ignore[arg-type]


class Alarm:
    """An event that calls `callback(alarm)` at `at_ns`. The callback must ignore an alarm that is no longer wanted."""

    __slots__ = ("callback",)

    def __init__(self, clock: VirtualClock, at_ns: int, order: int, callback: Callable[[Alarm], None]) -> None:
        self.callback = callback
        queue: list[Any] = clock._queue
        heappush(queue, (at_ns, order, next(clock._eid), self))


def from_seconds(seconds: float) -> int:
    return round(seconds * SECOND_NS)
