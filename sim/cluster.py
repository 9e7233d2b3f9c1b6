"""A simulated run: a workload, a router, and N replicas of one deployment on one virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serving.config import Deployment
from serving.cost_model import CostModel
from serving.request import Request
from serving.scheduler import find_policy
from serving.workload import Workload, WorkloadRequest
from sim.clock import ARRIVAL, Alarm, VirtualClock
from sim.replica import Replica
from sim.router import RoundRobin, Router
from sim.run_log import RunLog, RunSink


@dataclass(frozen=True)
class Simulated:
    """What a simulation did, in numbers; the rows are in its sink."""

    duration_ns: int
    finished: int
    steps: int
    output_tokens: int


class Cluster:
    """N replicas behind a router. `run` offers a workload to them and returns when all of it has ended."""

    def __init__(
        self,
        deployment: Deployment,
        cost: CostModel,
        sink: RunSink,
        *,
        replicas: int = 1,
        router: Router | None = None,
        shares_prefixes: bool = True,
        steps: bool = True,
        tokens: bool = False,
    ) -> None:
        policy = find_policy(deployment.policy)
        self._clock = VirtualClock()
        self._log = RunLog(sink, deployment.scheduler.block_size, steps, tokens)
        self._router = RoundRobin() if router is None else router
        self.replicas = [
            Replica(
                self._clock,
                index,
                policy(deployment.scheduler, shares_prefixes=shares_prefixes),
                cost,
                self._log,
                self._ended,
            )
            for index in range(replicas)
        ]
        self._arrivals: Iterator[WorkloadRequest] = iter(())
        self._offered_ns: Mapping[int, int] | None = None
        self._closed_loop = False

    def run(self, workload: Workload, offered_ns: Mapping[int, int] | None = None) -> Simulated:
        """Simulate `workload` to its end. Raises RuntimeError if a policy leaves requests behind.

        `offered_ns` says, by id, when each request reaches its replica, where that is not its arrival.
        """
        self._arrivals = iter(workload.requests)
        self._offered_ns = offered_ns
        self._closed_loop = workload.concurrency is not None
        for _ in range(workload.concurrency or 1):
            self._release_next()
        self._clock.run()
        left = sum(len(replica.scheduler.requests) for replica in self.replicas)
        if left:
            raise RuntimeError(f"{left} requests never finished: the policy stopped scheduling them")
        self._log.close()
        return Simulated(self._clock.now_ns, self._log.finished, self._log.steps, self._log.output_tokens)

    def _release_next(self) -> None:
        """The next request in order arrives: at its time, or now if that has passed (in a closed loop)."""
        request = next(self._arrivals, None)
        if request is not None:
            due_ns = request.arrival_ns if self._offered_ns is None else self._offered_ns[request.id]
            at_ns = max(self._clock.now_ns, due_ns)
            Alarm(self._clock, at_ns, ARRIVAL, lambda _: self._offer(request))

    def _offer(self, request: WorkloadRequest) -> None:
        self._router.choose(request, self.replicas).offer(request, self._clock.now_ns)
        if not self._closed_loop:
            self._release_next()

    def _ended(self, request: Request) -> None:
        if self._closed_loop:
            self._release_next()
