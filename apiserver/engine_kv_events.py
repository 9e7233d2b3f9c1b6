"""The KV events of one real engine: its thread makes them, and the thread that owns the sockets publishes them."""

from __future__ import annotations

from time import time

import zmq

from apiserver.kv_events import KvEvents
from apiserver.kv_feeds import observe
from apiserver.kv_publisher import KvPublisher
from apiserver.settings import KvEventSettings
from realengine.engine import Engine
from serving.request import Request


class EngineKvEvents(KvPublisher):
    """The KV events of the engine at `place`.

    The engine's thread calls `follow` and `take`, the other thread publishes.

    If its process was `begun_again`, the engine is new, and its first event says that its cache is empty. Raises
    UserError if its endpoints cannot be bound.
    """

    def __init__(
        self, settings: KvEventSettings, place: int, topic: str, poller: zmq.Poller, begun_again: bool = False
    ) -> None:
        super().__init__(settings, place, topic, zmq.Context.instance(), poller)
        self._settings = settings
        self._begun_again = begun_again

    def follow(self, engine: Engine) -> None:
        """Start to follow `engine`, which has had no request yet. Raises UserError if it has no prefix cache."""

        def tokens(request: Request, begin: int, end: int) -> list[int]:
            return engine.sequences[request.id].tokens[begin:end]

        self._events = KvEvents(self._settings, engine.deployment.scheduler.block_size, tokens)
        observe(engine.scheduler.pool, self._events, self._settings)
        if self._begun_again:
            self._events.cleared()

    def take(self) -> bytes | None:
        """Return the events since the last call as a batch; None if there are none."""
        return self._events.take(time())
