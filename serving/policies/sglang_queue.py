"""The queue of SGLang's waiting requests, and its order: the setting `schedule_policy`, as in `SchedulePolicy`.

Requests are sorted just before a step may admit some. `fcfs` keeps the order of arrival, `lpm` puts the longest cached
prefix first, `dfs-weight` walks the cached prefixes depth first, `lof` puts the largest output limit first, `random`
shuffles. A retracted request joins at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.radix_pool import RadixPool
from tokentwin.serving.request import Request

_MOST_MATCHED = 128  # longer queues are not matched with the cache
_REFRESH_INTERVAL = 32  # queues that are not matched keep their cached prefixes in use once in so many passes
_SHORT_PREFIX = 32  # IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD: a longer cached prefix needs no other request
_LONG_PREFIX = 32  # IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD: wait for a request with so long a common prefix


class SglangQueue:
    """Requests that wait.

    Attributes:
        seen: requests that the scheduler considers, in order
        unseen: requests that came since it last looked for new ones, or whose grammar is being compiled
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.seen: list[Request] = []
        self.unseen: list[Request] = []
        self._policy = config.schedule_policy if config.enable_prefix_caching else _without_cache(config)
        self._by_priority = config.policy == "priority"
        self._random = Random(config.schedule_seed)
        self._passes = 0

    def __len__(self) -> int:
        return len(self.seen) + len(self.unseen)

    def __iter__(self) -> Iterator[Request]:
        yield from self.seen
        yield from self.unseen

    def add(self, request: Request) -> None:
        self.unseen.append(request)

    def put_back(self, request: Request) -> None:
        self.seen.append(request)

    def remove(self, request: Request) -> None:
        (self.unseen if request in self.unseen else self.seen).remove(request)

    def steps_at_head(self, head: Request, steps: int) -> int:
        return 0

    def look(self) -> list[Request]:
        """Consider new requests from now on, and return them."""
        if not self.unseen:
            return []
        new = [request for request in self.unseen if not request.compiling]
        self.seen += new
        self.unseen = [request for request in self.unseen if request.compiling]
        return new

    def drop(self, id: int) -> None:
        """Remove the request with this id from those that the scheduler considers."""
        self.seen = [request for request in self.seen if request.id != id]

    def quiet_passes(self, pool: RadixPool) -> int:
        """Return how many passes in a row would not mark cached prefixes as used, if no request is admitted."""
        return -self._passes % _REFRESH_INTERVAL if pool.caches else 1 << 60

    def skip(self, passes: int, pool: RadixPool) -> None:
        if self.seen and pool.caches:
            self._passes += passes

    def leave(self, admitted: list[Request]) -> None:
        """Remove `admitted` requests."""
        count = len(admitted)
        if all(one is other for one, other in zip(admitted, self.seen, strict=False)):  # nearly always
            del self.seen[:count]
        else:
            gone = {request.id for request in admitted}
            self.seen = [request for request in self.seen if request.id not in gone]

    def sort(self, pool: RadixPool) -> None:
        """Put the requests in order, and mark their cached prefixes as used."""
        policy, seen = self._policy, self.seen
        if policy == "lpm" and len(seen) > _MOST_MATCHED:
            policy = "fcfs"
        if policy == "lpm":
            deferred: set[int] = set()
            matched = self._matched(pool, deferred)
            most = 1 << 60
            seen.sort(key=lambda request: most if request.id in deferred else -matched[request.id])
        elif policy == "dfs-weight":
            self._walk(pool)
        else:
            if policy == "random":
                self._random.shuffle(seen)
            elif policy == "lof":
                seen.sort(key=lambda request: request.prompt_len - request.max_len)
            if self._by_priority:
                seen.sort(key=lambda request: request.priority)
            self._refresh(pool)

    def _matched(self, pool: RadixPool, deferred: set[int]) -> dict[int, int]:
        """Return the cached tokens of each request, by id.

        Puts a request into `deferred` if it has next to no cached prefix, but a long prefix in common with a request
        before it, which will be cached when that one has run.
        """
        matched: dict[int, int] = {}
        openings: set[Hashable] = set()
        for request in self.seen:
            known = request.known
            cached = pool.match(request, known).end
            matched[request.id] = min(cached, known - 1)
            if cached <= _SHORT_PREFIX and known >= _LONG_PREFIX:
                opening = pool.opening(request, _LONG_PREFIX)
                if opening in openings:
                    deferred.add(request.id)
                openings.add(opening)
        return matched

    def _walk(self, pool: RadixPool) -> None:
        self._matched(pool, set())
        at = [(pool.match(request, request.known), request) for request in self.seen]
        weights: dict[object, list[Request]] = {}
        for node, request in at:
            weights.setdefault(node, []).append(request)
        order = pool.tree.heaviest_first({node: len(weights[node]) for node, _ in at})
        self.seen = [request for node in order for request in weights.get(node, ())]

    def _refresh(self, pool: RadixPool) -> None:
        """Mark the cached prefixes of waiting requests as used, in one of 32 passes; the first request comes last."""
        if self.seen and pool.caches:
            if self._passes % _REFRESH_INTERVAL == 0:
                for request in reversed(self.seen[:_MOST_MATCHED]):
                    pool.match(request, request.known)
            self._passes += 1


def _without_cache(config: SchedulerConfig) -> str:
    """Return the order without a prefix cache: policies that need it become `fcfs`."""
    return config.schedule_policy if config.schedule_policy in ("lof", "random") else "fcfs"
