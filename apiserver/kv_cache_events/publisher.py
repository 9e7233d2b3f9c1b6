"""A publisher of KV events by vLLM's ZeroMQ protocol, which can also send missed batches again.

A message has a topic, a sequence number (8 bytes, starting at 0) and a batch. To get batches again, a subscriber sends
the number of the first batch that it missed. The batches come in order, and a message with the number -1 ends them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from tokentwin.apiserver.settings import KvEventSettings
from tokentwin.serving.errors import UserError

_END = (-1).to_bytes(8, "big", signed=True)
_MOST_WAITING = 100_000  # maximum number of messages that wait for a slow subscriber, as in vLLM; it misses the rest


class KvPublisher:
    """The publisher of the replica at `place` in the fleet.

    When a replay request comes, `poller` wakes; `replay` then answers it. Raises UserError if an endpoint cannot be
    bound or connected.
    """

    def __init__(
        self,
        settings: KvEventSettings,
        place: int,
        topic: str,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
    ) -> None:
        self._topic = topic.encode()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._poller = poller
        self._replays: zmq.Socket[bytes] | None = None
        self._published = context.socket(zmq.PUB)
        self._published.set_hwm(_MOST_WAITING)
        try:
            if settings.connect:
                _at(self._published.connect, "endpoint", settings.endpoint)
            else:
                _at(self._published.bind, "endpoint", settings.endpoint, place)
            if settings.replay_endpoint is not None:
                self._replays = context.socket(zmq.ROUTER)
                self._replays.setsockopt(zmq.SNDHWM, 2 * (settings.buffer_steps + 1))
                _at(self._replays.bind, "replay_endpoint", settings.replay_endpoint, place)
                poller.register(self._replays, zmq.POLLIN)
        except UserError:
            self.close()
            raise

    def publish(self, batch: bytes) -> None:
        """Publish one batch with the next sequence number."""
        number, self._next = self._next.to_bytes(8, "big"), self._next + 1
        self._published.send_multipart([self._topic, number, batch])
        if self._replays is not None:
            self._kept.append((number, batch))

    def restart(self) -> None:
        """Begin again with number 0 for a new replica, and forget the batches that were published before."""
        self._next = 0
        self._kept.clear()

    def replay(self) -> None:
        """Answer all replay requests."""
        with suppress(zmq.Again):
            while self._replays is not None:
                peer, *request = self._replays.recv_multipart(zmq.NOBLOCK)
                if len(request) != 2 or len(request[1]) != 8:
                    continue
                for number, batch in self._kept:
                    if number >= request[1]:
                        self._replays.send_multipart([peer, b"", self._topic, number, batch])
                self._replays.send_multipart([peer, b"", b"", _END, b""])

    def close(self) -> None:
        if self._replays is not None:
            if self._replays in self._poller:
                self._poller.unregister(self._replays)
            self._replays.close(linger=0)
        self._published.close(linger=500)


def _at(open_: Callable[[str], object], name: str, endpoint: str, place: int = 0) -> None:
    """Call `open_` with the address that is `place` ports above `endpoint`, the value of the setting `name`."""
    address, _, port = endpoint.rpartition(":")
    try:
        open_(f"{address}:{int(port) + place}")
    except zmq.ZMQError as error:
        remedy = f"cannot be had for replica {place}: {error}; give another, or see connect"
        raise UserError(f"kv_events.{name}", endpoint, remedy) from None
