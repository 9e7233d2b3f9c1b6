"""Autoscalers. Each reviews one pool at regular times, and starts or drains replicas.

Scaling out is proportional, as in Kubernetes' HorizontalPodAutoscaler: ceil(ready replicas * value / target). An
autoscaler scales in by one replica at a time, which it drains first, and only when a cooldown has passed since the last
change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from simpy.events import ProcessGenerator

from serving.deployments.fleet import AutoscalerConfig
from sim.clock import VirtualClock, from_seconds
from sim.fleet import Fleet, Life
from sim.run_log import RunLog


def autoscaling(clock: VirtualClock, scalers: Sequence[Autoscaler], for_ever: bool = False) -> ProcessGenerator:
    """Run as a process on the clock that lets each autoscaler review its pool when it is due, in order of `scalers`.

    Unless `for_ever`, the process ends when no other event is left on the clock. One process runs all autoscalers;
    several processes would keep one another alive.
    """
    while True:
        for scaler in scalers:
            if scaler.due_ns <= clock.now_ns:
                scaler.look()
        if not for_ever and clock.now_ns and clock.peek() == float("inf"):
            return
        yield clock.until(min(scaler.due_ns for scaler in scalers))


class Autoscaler:
    """The autoscaler of pool number `pool` of a fleet.

    Attributes:
        due_ns: time of the next review
    """

    def __init__(self, clock: VirtualClock, log: RunLog, fleet: Fleet, pool: int, config: AutoscalerConfig) -> None:
        self.due_ns = 0
        self._clock = clock
        self._fleet = fleet
        self._pool = pool
        self._config = config
        self._changed_ns = 0
        self._attainment = _Attainment(config.slo_ms.items())
        fleet.scaled_pools.add(pool)
        if config.metric == "attainment":
            log.observers.append(self._attainment.note)

    def look(self) -> None:
        """Review the pool now: start or drain replicas as its metric demands."""
        staying = [life for life in self._fleet.living(self._pool) if not life.drains]
        wanted = min(max(self._wanted(staying), self._config.min_replicas), self._config.max_replicas)
        for _ in range(wanted - len(staying)):
            self._fleet.start(self._pool, from_seconds(self._config.cold_start_s))
        if wanted < len(staying):
            self._fleet.drain(_dispensable(staying))
        if wanted != len(staying):
            self._changed_ns = self._clock.now_ns
        self.due_ns = self._clock.now_ns + from_seconds(self._config.interval_s)

    def _wanted(self, staying: list[Life]) -> int:
        config, count = self._config, len(staying)
        serving = [life.replica for life in staying if life.serves]
        rested = self._clock.now_ns - self._changed_ns >= from_seconds(config.cooldown_s)
        if config.metric == "attainment":
            share = self._attainment.take()
            if share is None or len(serving) < count:  # no request ended, or a started replica is not ready yet
                return count
            return count + (share < config.target) - (rested and share >= max(config.scale_in_at, config.target))
        if not serving:
            return count
        if config.metric == "queue":
            value = sum(replica.queued_requests for replica in serving) / len(serving)
        else:
            value = sum(replica.used_blocks / replica.scheduler.pool.total for replica in serving) / len(serving)
        if value > config.target:
            return max(count, ceil(len(serving) * value / config.target))
        return count - (rested and value < config.scale_in_below * config.target)


class _Attainment:
    """The share of requests that met all SLOs, among all requests that ended since the last call of `take`."""

    def __init__(self, slo_ms: Iterable[tuple[str, float]]) -> None:
        self._bounds_ns = {name: bound * 1e6 for name, bound in slo_ms}
        self._ended = self._met = 0

    def note(self, finished: bool, outputs: int, arrival_ns: int, first_token_ns: int | None, end_ns: int) -> None:
        self._ended += 1
        if finished and first_token_ns is not None:
            values_ns = {
                "ttft": first_token_ns - arrival_ns,
                "tpot": (end_ns - first_token_ns) / max(outputs - 1, 1),
                "e2e": end_ns - arrival_ns,
            }
            self._met += all(values_ns[name] <= bound for name, bound in self._bounds_ns.items())

    def take(self) -> float | None:
        """Return the share and reset it; None if no request ended."""
        share = self._met / self._ended if self._ended else None
        self._ended = self._met = 0
        return share


def _dispensable(staying: list[Life]) -> Life:
    """Return the replica to drain: a replica that is not ready, or else one with the fewest requests.

    Among equals it is the youngest.
    """
    return min(staying, key=lambda life: (life.serves, life.replica.outstanding_requests, -life.replica.index))
