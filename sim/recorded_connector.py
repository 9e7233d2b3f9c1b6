"""The KV connector of an oracle recording: how much KV of each request can be loaded, and how long loads take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from simpy.events import ProcessGenerator

from serving.request import Request
from sim.clock import TRANSFER_ENDS, VirtualClock
from sim.replica import Replica


@dataclass(frozen=True)
class Outside:
    """The KV outside the engine.

    Attributes:
        tokens: number of tokens with KV outside the engine, by request id
        failing: ids of the requests of which the first load fails
        base_ns: time of a load beside the time of its tokens
        per_token_ns: time of a load for each token
        sync: True if the step that admits a request loads its KV, in no time
        whole: True if all known tokens of a request can be loaded; otherwise all but the last
    """

    tokens: Mapping[int, int]
    failing: Collection[int]
    base_ns: int = 0
    per_token_ns: int = 0
    sync: bool = False
    whole: bool = False


class RecordedConnector:
    """The `serving.kv.external.ExternalKv` of `replica`, which offers the KV of `outside`.

    It writes to `hits`, by request id, how many tokens were cached or loaded at the first admission.
    """

    def __init__(self, clock: VirtualClock, replica: Replica, outside: Outside, hits: dict[int, int]) -> None:
        self._hits = hits
        self.synchronous = outside.sync
        self._clock = clock
        self._replica = replica
        self._outside = outside
        self._failed: set[int] = set()

    def matched(self, request: Request, found: int) -> int:
        if request.id in self._failed:
            return 0
        most = request.known if self._outside.whole else request.known - 1
        return max(min(self._outside.tokens[request.id], most) - found, 0)

    def load(self, request: Request, start: int, tokens: int) -> None:
        if not self.synchronous:
            self._clock.start(self._load(request, self._outside.base_ns + self._outside.per_token_ns * tokens))

    def _load(self, request: Request, ns: int) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + ns, TRANSFER_ENDS)
        if request.id in self._outside.failing:
            self._failed.add(request.id)
            self._replica.load_failed(request)
        else:
            self._replica.loaded(request)

    def admitted(self, request: Request) -> None:
        self._hits.setdefault(request.id, request.cached)

    def keeps(self, request: Request) -> bool:
        return False
