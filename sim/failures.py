"""Accidents of a fleet: crashes, slow replicas and lost links, at given times or drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from serving.deployments.fleet import Crash, FailuresConfig, FleetConfig, LinkLoss, Slowdown
from serving.errors import UserError
from sim.clock import FLEET, Alarm, VirtualClock, from_seconds
from sim.fleet import Fleet, Life
from sim.links import Links

_MOST_IN_VAIN = 10_000  # random crashes in a row, without a request that finishes


class Failures:
    """The failures of a fleet. A failure of a replica that does not exist at its time has no effect."""

    def __init__(
        self,
        clock: VirtualClock,
        fleet: Fleet,
        config: FleetConfig,
        finished: Callable[[], int],
        links: Links | None = None,
    ) -> None:
        self._clock = clock
        self._finished = finished
        self._finished_before = self._in_vain = 0
        self._links = links
        self._fleet = fleet
        self._config = config
        self._failures: FailuresConfig = config.failures
        for crash in self._failures.crashes:
            self._at(crash)
        for slowdown in self._failures.slowdowns:
            self._at(slowdown)
        for loss in self._failures.link_losses:
            self._at(loss)
        if self._failures.mtbf_s is not None:
            fleet.on_ready.append(self._runs)
            for pool in range(len(config.pools)):
                for life in fleet.living(pool):
                    self._runs(life)

    def _runs(self, life: Life) -> None:
        """Draw how long a replica that is ready will run, for its place whatever else the fleet has."""
        assert self._failures.mtbf_s is not None
        drawn_for = f"{self._failures.seed}:{life.pool}:{life.slot}:{life.generation}"
        runs_s = Random(drawn_for).expovariate(1 / self._failures.mtbf_s)
        Alarm(self._clock, self._clock.now_ns + from_seconds(runs_s), FLEET, lambda _: self._wear_out(life))

    def _wear_out(self, life: Life) -> None:
        if not life.ended_by:
            finished = self._finished()
            self._in_vain = self._in_vain + 1 if finished == self._finished_before else 1
            self._finished_before = finished
            if self._in_vain > _MOST_IN_VAIN:
                remedy = f"crashed replicas {_MOST_IN_VAIN:,} times and no request finished in between; raise it"
                raise UserError("fleet.failures.mtbf_s", self._failures.mtbf_s, remedy)
            self._fleet.crash(life, from_seconds(self._failures.recovery_s))

    def _at(self, accident: Crash | Slowdown | LinkLoss) -> None:
        Alarm(self._clock, from_seconds(accident.at_s), FLEET, lambda _: self._happen(accident))

    def _happen(self, accident: Crash | Slowdown | LinkLoss) -> None:
        serving = [life for life in self._fleet.living(self._config.pool_number(accident.pool)) if life.serves]
        if accident.replica >= len(serving):
            return
        life = serving[accident.replica]
        if isinstance(accident, Crash):
            recovery_s = accident.recovery_s
            self._fleet.crash(life, None if recovery_s is None else from_seconds(recovery_s))
            return
        over_ns = self._clock.now_ns + from_seconds(accident.for_s)
        if isinstance(accident, LinkLoss):
            links, index = self._links, life.replica.index
            assert links is not None
            links.lose(index)
            Alarm(self._clock, over_ns, FLEET, lambda _: links.restore(index))
            return
        replica, factor = life.replica, accident.factor
        replica.slow_down(factor)
        Alarm(self._clock, over_ns, FLEET, lambda _: replica.speed_up(factor))
