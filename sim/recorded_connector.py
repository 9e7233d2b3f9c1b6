"""The KV connector of an oracle recording: the KV outside of each request, and how long its loads took."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from simpy.events import ProcessGenerator

from serving.request import Request
from sim.clock import TRANSFER_ENDS, VirtualClock
from sim.replica import Replica


@dataclass(frozen=True)
class Outside:
    """The KV outside: `tokens` of each request, by id; the first load of each id in `failing` fails.

    Attributes:
        sync: the step that admits a request loads them; else a load takes `base_ns`, and `per_token_ns` for each token
        whole: whether all of a prompt can be loaded; else all but its last token
    """

    tokens: Mapping[int, int]
    failing: Collection[int]
    base_ns: int = 0
    per_token_ns: int = 0
    sync: bool = False
    whole: bool = False


class RecordedConnector:
    """The KV of `outside`, as the scheduler of `replica` sees it: see `serving.kv.external.ExternalKv`.

    `hits` takes how many tokens of each request were cached or loaded at its first admission.
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
