"""A user's own process on the virtual clock: a generator that waits, and acts on the fleet.

The user's function is called with the clock and the `Controls` of the fleet. It yields `clock.until(at_ns)` or any
other SimPy event. An exception in it becomes a one-line error.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from simpy import Event

from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.serving.user_code.plugins import find_object, make
from tokentwin.sim.clock import VirtualClock, from_seconds
from tokentwin.sim.fleet import Fleet, Life

FIELD = "fleet.processes"


class Controls:
    """What a user's process may do with a fleet.

    A replica is represented by its `Life`, with `replica` (`outstanding_requests`, `used_blocks`, ...), `pool` and
    `ready_ns`. Pools are given by name; None is the first pool.
    """

    def __init__(self, fleet: Fleet, config: FleetConfig) -> None:
        self._fleet, self._config = fleet, config

    def serving(self, pool: str | None = None) -> list[Life]:
        """Return the replicas of a pool that take requests, the oldest first."""
        return [life for life in self._fleet.living(self._number(pool)) if life.serves]

    def start(self, pool: str | None = None, cold_start_s: float = 0.0) -> None:
        """Start another replica, which is ready after `cold_start_s` seconds."""
        self._fleet.start(self._number(pool), from_seconds(cold_start_s))

    def drain(self, life: Life) -> None:
        """Send no more requests to a replica; it ends when it has none."""
        if not life.drains and not life.ended_by:
            self._fleet.drain(life)

    def crash(self, life: Life, recovery_s: float | None = None) -> None:
        """Crash a replica; a successor is ready after `recovery_s` seconds (None: no successor)."""
        if not life.ended_by:
            self._fleet.crash(life, None if recovery_s is None else from_seconds(recovery_s))

    def _number(self, pool: str | None) -> int:
        names = [one.name for one in self._config.pools]
        if pool is not None and pool not in names:
            raise UserError(FIELD, pool, f"is no pool of the fleet; choose one of {', '.join(names)}")
        return self._config.pool_number(pool)


def own_process(name: str, clock: VirtualClock, controls: Controls) -> Generator[Event, Any, None]:
    """Return the process that the user's function `name` makes. Raises UserError if it does not make a generator."""
    made = make(FIELD, name, find_object(FIELD, name, {}), clock, controls)
    if not isinstance(made, Generator):
        raise UserError(FIELD, name, "must be a function with yield, such as `yield clock.until(at_ns)`")
    return _watched(name, made)


def _watched(name: str, process: Generator[Event, Any, None]) -> Generator[Event, Any, None]:
    value: Any = None
    while True:
        try:
            event = limited(process.send, value)
        except Fault as fault:
            if isinstance(fault.__cause__, StopIteration):
                return
            raise UserError(FIELD, name, fault.what) from fault.__cause__
        if not isinstance(event, Event):
            raise UserError(FIELD, name, f"yielded {event!r}, which is no event; yield clock.until(at_ns)")
        value = yield event
