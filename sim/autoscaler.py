"""Autoscalers. Each reviews one pool at regular times, and starts or drains replicas.

Scaling out is proportional: ceil(ready replicas * value / target). By the rule `proportional` an autoscaler scales in
by one replica at a time, and only when a cooldown has passed since the last change. The rule `hpa` is that of
Kubernetes' HorizontalPodAutoscaler for metrics of the type AverageValue, with its defaults: a tolerance of a tenth, at
most twice as many replicas or four more at a time, and stabilisation windows (kubernetes.io, "Horizontal Pod
Autoscaling"). A replica drains before it ends.

A pool without replicas gets one as soon as a request is in the fleet. The last replica stays while it has requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

from simpy.events import ProcessGenerator

from tokentwin.serving.deployments.fleet import AutoscalerConfig
from tokentwin.sim.clock import VirtualClock, from_seconds
from tokentwin.sim.fleet import Fleet, Life
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog

_TOLERANCE = 0.1  # of rule hpa: relative deviation from the target that changes nothing
_AT_LEAST = 4  # of rule hpa: replicas that may be added at a time, or as many as there are


class _Scraped(NamedTuple):
    """The metrics of a pool at a time: the number of ready replicas, and the sum of each metric over them."""

    at_ns: int
    ready: int
    totals: dict[str, float]


def autoscaling(clock: VirtualClock, scalers: Sequence[Autoscaler], for_ever: bool = False) -> ProcessGenerator:
    """Run as a process on the clock that lets each autoscaler review its pool when it is due, in order of `scalers`.

    Unless `for_ever`, the process ends when no other event is left on the clock, and no pool without replicas has
    requests. One process runs all autoscalers; several processes would keep one another alive.
    """
    while True:
        for scaler in scalers:
            if scaler.due_ns <= clock.now_ns:
                scaler.look()
        ended = clock.now_ns and clock.peek() == float("inf")
        if ended and not for_ever and not any(scaler.wakes for scaler in scalers):
            return
        yield clock.until(min(scaler.due_ns for scaler in scalers))


class Autoscaler:
    """The autoscaler of pool number `pool` of a fleet.

    `cold_start_s` is the time until an added replica is ready, and `waiting` returns the number of requests in the
    fleet.

    Attributes:
        due_ns: time of the next review
    """

    def __init__(
        self,
        clock: VirtualClock,
        log: RunLog,
        fleet: Fleet,
        pool: int,
        config: AutoscalerConfig,
        cold_start_s: float,
        waiting: Callable[[], int],
    ) -> None:
        self.due_ns = 0
        self._clock = clock
        self._fleet = fleet
        self._pool = pool
        self._config = config
        self._cold_start_ns = from_seconds(cold_start_s)
        self._waiting = waiting
        self._changed_ns = 0
        self._scrapes: deque[_Scraped] = deque()
        self._wishes: deque[tuple[int, int]] = deque()  # times and numbers of replicas that rule hpa wanted
        self._attainment = _Attainment(config.slo_ms.items())
        fleet.scaled_pools.add(pool)
        if config.metric == "attainment":
            log.observers.append(self._attainment.note)

    def look(self) -> None:
        """Review the pool now: start or drain replicas as its metric demands."""
        staying = [life for life in self._fleet.living(self._pool) if not life.drains]
        wanted = min(max(self._wanted(staying), self._config.min_replicas), self._config.max_replicas)
        if wanted != len(staying):
            self._changed_ns = self._clock.now_ns
        for _ in range(wanted - len(staying)):
            self._fleet.start(self._pool, self._cold_start_ns)
        while wanted < len(staying):
            staying.remove(dispensable := _dispensable(staying))
            self._fleet.drain(dispensable)
        self.due_ns = self._clock.now_ns + from_seconds(self._config.interval_s)

    @property
    def wakes(self) -> bool:
        """True if the pool has no replica, and will get one because the fleet has requests."""
        return self._waiting() > 0 and not self._fleet.living(self._pool)

    def _wanted(self, staying: list[Life]) -> int:
        config, count = self._config, len(staying)
        serving = [life.replica for life in staying if life.serves]
        rested = self._clock.now_ns - self._changed_ns >= from_seconds(config.cooldown_s)
        if config.metric == "attainment":
            share = self._attainment.take()
            if share is None or len(serving) < count:  # no request ended, or a started replica is not ready yet
                return count
            target = config.goals[config.metric]
            return count + (share < target) - (rested and share >= max(config.scale_in_at, target))
        if not count:
            return int(self._waiting() > 0)
        seen = self._scrape(serving)
        if seen is None or not seen.ready:
            return count
        if config.rule == "hpa":
            wanted = self._stabilised(max(self._by_hpa(seen, name, count) for name in config.goals), count)
        else:
            wanted = max(self._in_proportion(seen, name, count, rested) for name in config.goals)
        busy = any(life.replica.outstanding_requests for life in staying)
        return max(wanted, 1) if busy else wanted

    def _scrape(self, serving: Sequence[Replica]) -> _Scraped | None:
        """Keep the metrics of the replicas, and return the newest ones that are `scrape_delay_s` old, if there are."""
        values = {
            "queue": sum(replica.queued_requests for replica in serving),
            "kv": sum(replica.used_blocks / replica.scheduler.pool.total for replica in serving),
        }
        self._scrapes.append(_Scraped(self._clock.now_ns, len(serving), values))
        until_ns = self._clock.now_ns - from_seconds(self._config.scrape_delay_s)
        while len(self._scrapes) > 1 and self._scrapes[1].at_ns <= until_ns:
            self._scrapes.popleft()
        return self._scrapes[0] if self._scrapes[0].at_ns <= until_ns else None

    def _in_proportion(self, seen: _Scraped, name: str, count: int, rested: bool) -> int:
        value, target = seen.totals[name] / seen.ready, self._config.goals[name]
        if value > target:
            return max(count, ceil(seen.ready * value / target))
        return count - (rested and value < self._config.scale_in_below * target)

    def _by_hpa(self, seen: _Scraped, name: str, count: int) -> int:
        total, target = seen.totals[name], self._config.goals[name]
        if abs(total / (target * count) - 1) <= _TOLERANCE:
            return count
        return min(ceil(total / target), max(2 * count, count + _AT_LEAST))

    def _stabilised(self, wanted: int, count: int) -> int:
        """Return the number of replicas that was wanted throughout a window, which is as near to `count` as any."""
        now, out_ns, in_ns = self._clock.now_ns, *map(from_seconds, self._windows_s)
        self._wishes.append((now, wanted))
        while self._wishes[0][0] < now - max(out_ns, in_ns):
            self._wishes.popleft()
        if wanted > count:
            return max(count, min(wish for at_ns, wish in self._wishes if at_ns >= now - out_ns))
        return min(count, max(wish for at_ns, wish in self._wishes if at_ns >= now - in_ns))

    @property
    def _windows_s(self) -> tuple[float, float]:
        return self._config.scale_out_window_s, self._config.cooldown_s


class _Attainment:
    """The share of requests that met all SLOs, among all requests that ended since the last call of `take`."""

    def __init__(self, slo_ms: Iterable[tuple[str, float]]) -> None:
        self._bounds_ns = {name: bound * 1e6 for name, bound in slo_ms}
        self._ended = self._met = 0

    def note(
        self, id: int, finished: bool, outputs: int, arrival_ns: int, first_token_ns: int | None, end_ns: int
    ) -> None:
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
