"""A simulated fleet that gets its requests while it runs; its caller sets the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from simpy.events import ProcessGenerator

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.clock import ARRIVAL
from tokentwin.sim.cluster import Cluster, Simulated
from tokentwin.sim.fleet import Life
from tokentwin.sim.remote_prefills import RemotePrefills


class LiveCluster(Cluster):
    """A `Cluster` without a workload. Requests that come together arrive at one time, as from a trace.

    A simulation that offers equal requests at equal times makes equal decisions. Raises UserError for a fleet whose
    decode replicas reserve KV blocks before the prefill, and for a fleet with encoder replicas.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self._config.reserves_first:
            remedy = "is only simulated, and cannot be served live; set it to after-prefill"
            raise UserError("fleet.decode_reserves", self._config.decode_reserves, remedy)
        if self._config.encodes_apart:
            raise UserError("fleet.pools.role", "encode", "is only simulated, and cannot be served live; leave it out")
        self._begin(for_ever=True)
        self._emptied_ns = 0
        self._replica_lives, self._changes = self._fleet.record(), self._fleet.changes

    @property
    def next_ns(self) -> float:
        """The time of the next event without further input; infinite if there is none."""
        return self._clock.peek()

    @property
    def living(self) -> list[Life]:
        """The replicas that have become ready and have not ended."""
        pools = range(len(self._fleet.pools))
        return [life for pool in pools for life in self._fleet.living(pool) if life.ready_ns is not None]

    @property
    def replica_lives(self) -> list[dict[str, Any]]:
        """The value of the column `replica_lives` when the fleet last became empty; a simulation would end there."""
        return self._replica_lives

    def deployment(self, life: Life) -> Deployment:
        """Return the settings of a replica."""
        return self._fleet.pools[life.pool].deployment

    def advance(self, to_ns: int, inputs: Sequence[Callable[[int], None]] = ()) -> None:
        """Process all events up to `to_ns`, and then call `inputs`, which call `offer` and `give_up`.

        The inputs are called at the first time from `to_ns` on at which no other event happens, so that their order
        among events does not depend on chance. This time is their argument. Raises UserError if a policy breaks its
        contract.
        """
        clock = self._clock
        self._until(to_ns)
        if inputs:
            at_ns = max(to_ns, clock.now_ns + 1)
            while clock.peek() <= at_ns:
                self._until(at_ns)
                at_ns += 1
            clock.start(self._put(inputs, at_ns))
            self._until(at_ns)

    def offer(self, request: WorkloadRequest) -> None:
        """Take `request`, which arrives now."""
        self._gateway.offer(request)

    def gives(self, live: Request) -> bool:
        """Return whether users get the tokens of `live`, an attempt at a request that has not left."""
        return self._gateway.gives(live)

    def give_up(self, id: int, status: str, reason: str) -> None:
        """End request `id`, because its client goes away now; `status` and `reason` are recorded."""
        self._gateway.give_up(id, status, reason)

    def follow(self, ready: Callable[[Life], None], gone: Callable[[Life], None]) -> None:
        """Call `ready` with each present and future replica that takes requests, and `gone` with each that ends."""
        for pool in range(len(self._fleet.pools)):
            for life in self._fleet.living(pool):
                if life.serves:
                    ready(life)
        self._fleet.on_ready.append(ready)
        self._fleet.on_gone.append(gone)

    def pull_prompts(self, links: LinksConfig, bytes_per_token: int) -> RemotePrefills:
        """Let replicas pull the KV of prompts that other servers prefill, over `links`.

        Raises UserError if a policy cannot load KV.
        """
        prefills = RemotePrefills(self._clock, self._log, links, bytes_per_token)
        self.follow(prefills.connect, lambda _: None)
        return prefills

    def finish(self, to_ns: int) -> Simulated:
        """Give up all requests that have not ended by `to_ns`, write the last rows to the sink, and close the run.

        The duration of the run is the time at which the fleet last became empty.
        """
        self.advance(to_ns, [self._give_all_up])
        return replace(self._end(), duration_ns=self._emptied_ns)

    def _put(self, inputs: Iterable[Callable[[int], None]], at_ns: int) -> ProcessGenerator:
        yield self._clock.until(at_ns, ARRIVAL)
        for put in inputs:
            put(at_ns)

    def _give_all_up(self, at_ns: int) -> None:
        for id in self._gateway.open_requests():
            self.give_up(id, "unfinished", "the server ended")

    def _until(self, to_ns: int) -> None:
        while self._clock.peek() <= to_ns:
            self._clock.step()

    def _left(self, request: WorkloadRequest) -> None:
        """Record the time if the fleet becomes empty. No client waits for an end of a request here."""
        if not len(self._gateway):
            self._emptied_ns = self._clock.now_ns
            if self._changes != self._fleet.changes:
                self._replica_lives, self._changes = self._fleet.record(), self._fleet.changes
