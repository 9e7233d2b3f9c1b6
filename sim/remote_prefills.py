"""Transfers of prompt KV from other servers, which run the prefill, to the replicas of a live fleet, which decode.

The other servers are not simulated. When a replica has blocks for a request, it pulls the KV that its prefix cache
lacks. Each replica and each server has its own link.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.request import Request, Status
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.fleet import Life
from tokentwin.sim.kv_transfers import links_of
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog


class RemotePrefills:
    """The prompts that other servers have prefilled, and the links to them. A token has `bytes_per_token` of KV."""

    def __init__(self, clock: VirtualClock, log: RunLog, links: LinksConfig, bytes_per_token: int) -> None:
        self.links = links_of(clock, links)
        self.bytes_per_token = bytes_per_token
        self._clock = clock
        self._log = log
        self._servers: dict[str, int] = {}  # index of each server on the links, below 0, by name
        self._at: dict[int, int] = {}  # by request id: index of the server that has the KV of its prompt

    def expect(self, id: int, server: str) -> None:
        """Record that `server` has the KV of the prompt of request `id`, which arrives now."""
        self._at[id] = self._servers.setdefault(server, -1 - len(self._servers))

    def forget(self, id: int) -> None:
        """Forget the KV of request `id`, if there is any."""
        self._at.pop(id, None)

    def connect(self, life: Life) -> None:
        """Connect a new replica. Raises UserError if its policy cannot load KV."""
        life.replica.connect(_Remote(self, life.replica))

    def matched(self, request: Request, cached_tokens: int) -> int:
        return max(request.prompt_len - cached_tokens, 0) if request.id in self._at else 0

    def pull(self, replica: Replica, request: Request, tokens: int) -> None:
        size = tokens * self.bytes_per_token
        self._log.transfer_begins(request, self._clock.now_ns)
        self.links.start(self._at.pop(request.id), replica.index, size, partial(self._pulled, replica, request))

    def _pulled(self, replica: Replica, request: Request) -> None:
        if request.status is not Status.ABORTED:
            self._log.transferred(request, self._clock.now_ns)
        replica.loaded(request)


class _Remote:
    """The `tokentwin.serving.kv.external.ExternalKv` of a replica, which offers the KV of other servers."""

    synchronous: ClassVar[bool] = False

    def __init__(self, prefills: RemotePrefills, replica: Replica) -> None:
        self._prefills = prefills
        self._replica = replica

    def matched(self, request: Request, cached_tokens: int) -> int:
        return self._prefills.matched(request, cached_tokens)

    def load(self, request: Request, start: int, tokens: int) -> None:
        self._prefills.pull(self._replica, request, tokens)

    def admitted(self, request: Request) -> None:
        self._prefills.forget(request.id)

    def keeps(self, request: Request) -> bool:
        return False
