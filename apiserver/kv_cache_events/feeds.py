"""The publishers of KV events, for the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING

import zmq

from tokentwin.apiserver.kv_cache_events.events import KvEvents
from tokentwin.apiserver.kv_cache_events.publisher import KvPublisher
from tokentwin.apiserver.settings import KvEventSettings
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.block_pool import BlockPool

if TYPE_CHECKING:
    from tokentwin.sim.fleet import Life


def observe(pool: object, events: KvEvents, settings: KvEventSettings) -> None:
    """Let `events` observe a replica's KV pool. Raises UserError if the pool has no prefix cache."""
    if not isinstance(pool, BlockPool) or not pool.caches:
        remedy = "tells what the prefix cache holds; leave enable_prefix_caching on"
        raise UserError("kv-events", settings.endpoint, remedy)
    pool.observe(events)


class KvFeeds:
    """The publishers of a fleet; they publish the events of a replica from when it is ready until it is gone.

    `make` returns the `KvEvents` of a replica, and `topic` the topic of a place in the fleet.
    """

    def __init__(
        self,
        settings: KvEventSettings,
        make: Callable[[Life], KvEvents],
        topic: Callable[[int], str],
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
    ) -> None:
        self._settings = settings
        self._make = make
        self._topic = topic
        self._context = context
        self._poller = poller
        self._events: dict[int, tuple[KvEvents, KvPublisher]] = {}  # key: index of the replica
        self._publishers: dict[int, KvPublisher] = {}  # key: place in the fleet

    def ready(self, life: Life) -> None:
        """Start to publish the events of a replica that takes requests.

        If the replica replaces another, its first event states that the cache is empty.

        Raises UserError if the endpoints cannot be bound, or if the replica has no prefix cache.
        """
        events, place = self._make(life), life.place
        observe(life.replica.scheduler.pool, events, self._settings)
        if (publisher := self._publishers.get(place)) is None:
            publisher = KvPublisher(self._settings, place, self._topic(place), self._context, self._poller)
            self._publishers[place] = publisher
        else:
            publisher.restart()
            events.cleared()
        self._events[life.replica.index] = events, publisher
        self.step_ended(life.replica.index)

    def gone(self, life: Life) -> None:
        """Stop publishing the events of a replica that has crashed or drained."""
        self._events.pop(life.replica.index, None)

    def step_ended(self, replica: int) -> None:
        """Publish the events since the replica's last step."""
        if (followed := self._events.get(replica)) is not None:
            events, publisher = followed
            if (batch := events.take(time())) is not None:
                publisher.publish(batch)

    def replay(self) -> None:
        """Answer all replay requests."""
        for publisher in self._publishers.values():
            publisher.replay()

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
