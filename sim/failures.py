"""Failures of a fleet: crashes, interruptions, slow replicas and lost links, at given or random times.

Each failure is a process on the clock. A failure of a replica that does not exist at its time has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simpy.events import ProcessGenerator

from tokentwin.serving.deployments.fleet import Crash, FleetConfig, Interruptions, LinkLoss, Slowdown
from tokentwin.serving.errors import UserError
from tokentwin.sim.clock import VirtualClock, from_seconds
from tokentwin.sim.fleet import Fleet, Life
from tokentwin.sim.links import Links

_MOST_IN_VAIN = 10_000  # maximum number of random losses in a row without a finished request


class Failures:
    """The failures that `config` describes for a fleet. They can happen from now on.

    Args:
        finished: function that returns the number of requests finished so far
        links: the KV links, which may be lost
    """

    def __init__(
        self,
        clock: VirtualClock,
        fleet: Fleet,
        config: FleetConfig,
        finished: Callable[[], int],
        links: Links | None = None,
    ) -> None:
        self._clock = clock
        self._fleet = fleet
        self._config = config
        self._finished = finished
        self._finished_before = self._in_vain = 0
        failures = config.failures
        for crash in failures.crashes:
            clock.start(self._crash(crash))
        for slowdown in failures.slowdowns:
            clock.start(self._slow_down(slowdown))
        for loss in failures.link_losses:
            assert links is not None
            clock.start(self._lose_link(loss, links))
        for interruptions in failures.interruptions:
            for at_s in interruptions.at_s:
                clock.start(self._interrupt(interruptions, at_s))
        self._taken = {config.pool_number(one.pool): one for one in failures.interruptions if one.per_hour}
        if failures.mtbf_s is not None or self._taken:
            fleet.on_ready.append(self._begin_to_wear)
            for pool in range(len(config.pools)):
                for life in fleet.living(pool):
                    self._begin_to_wear(life)

    def _crash(self, crash: Crash) -> ProcessGenerator:
        yield self._clock.until(from_seconds(crash.at_s))
        if (life := self._serving(crash)) is not None:
            self._fleet.crash(life, None if crash.recovery_s is None else from_seconds(crash.recovery_s))

    def _interrupt(self, interruptions: Interruptions, at_s: float) -> ProcessGenerator:
        yield self._clock.until(from_seconds(at_s))
        pool = self._fleet.living(self._config.pool_number(interruptions.pool))
        if (life := next((life for life in pool if life.serves), None)) is not None:
            self._take(life, interruptions)

    def _take(self, life: Life, interruptions: Interruptions) -> None:
        restart_s = interruptions.restart_s
        restart_ns = None if restart_s is None else from_seconds(restart_s)
        self._fleet.interrupt(life, from_seconds(interruptions.notice_s), restart_ns)

    def _slow_down(self, slowdown: Slowdown) -> ProcessGenerator:
        yield self._clock.until(from_seconds(slowdown.at_s))
        if (life := self._serving(slowdown)) is not None:
            life.replica.slow_down(slowdown.factor)
            yield self._clock.until(self._clock.now_ns + from_seconds(slowdown.for_s))
            life.replica.speed_up(slowdown.factor)

    def _lose_link(self, loss: LinkLoss, links: Links) -> ProcessGenerator:
        yield self._clock.until(from_seconds(loss.at_s))
        if (life := self._serving(loss)) is not None:
            links.lose(life.replica.index)
            yield self._clock.until(self._clock.now_ns + from_seconds(loss.for_s))
            links.restore(life.replica.index)

    def _serving(self, failure: Crash | Slowdown | LinkLoss) -> Life | None:
        """Return the replica that fails now; None if the pool has too few serving replicas."""
        serving = [life for life in self._fleet.living(self._config.pool_number(failure.pool)) if life.serves]
        return serving[failure.replica] if failure.replica < len(serving) else None

    def _begin_to_wear(self, life: Life) -> None:
        if self._config.failures.mtbf_s is not None:
            self._clock.start(self._wear_out(life))
        if life.pool in self._taken:
            self._clock.start(self._wait_to_be_taken(life, self._taken[life.pool]))

    def _wear_out(self, life: Life) -> ProcessGenerator:
        """Crash a replica after a random time that depends only on the seed, its place and its generation there."""
        failures = self._config.failures
        assert failures.mtbf_s is not None
        drawn = Random(f"{failures.seed}:{life.pool}:{life.slot}:{life.generation}").expovariate(1 / failures.mtbf_s)
        yield self._clock.until(self._clock.now_ns + from_seconds(drawn))
        if life.ended_by:
            return
        self._count("mtbf_s", failures.mtbf_s, "crashed", "raise")
        self._fleet.crash(life, from_seconds(failures.recovery_s))

    def _wait_to_be_taken(self, life: Life, interruptions: Interruptions) -> ProcessGenerator:
        """Interrupt a replica after a random time that depends only on the seed, its place and its generation."""
        drawn = Random(f"{self._config.failures.seed}:taken:{life.pool}:{life.slot}:{life.generation}")
        hours = drawn.expovariate(interruptions.per_hour)
        yield self._clock.until(self._clock.now_ns + from_seconds(3600 * hours))
        if life.ended_by:
            return
        self._count("interruptions.per_hour", interruptions.per_hour, "interrupted", "lower")
        self._take(life, interruptions)

    def _count(self, field: str, value: float, happened: str, remedy: str) -> None:
        """Count a random loss. Raises UserError if there were very many and no request finished in between."""
        finished = self._finished()
        self._in_vain = self._in_vain + 1 if finished == self._finished_before else 1
        self._finished_before = finished
        if self._in_vain > _MOST_IN_VAIN:
            remedy = f"{happened} replicas {_MOST_IN_VAIN:,} times and no request finished in between; {remedy} it"
            raise UserError(f"fleet.failures.{field}", value, remedy)
