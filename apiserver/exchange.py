"""The engine process's end of the wire: requests by ids of its own, and answers by API process."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from apiserver.messages import From, Message, Output, Outputs, encode, read_request
from realengine.logprob import Logprob


class Exchange:
    """A ROUTER socket at `address`.

    Requests get ids in the order of their arrival, which no client can choose; or keep the ids that they come with,
    where they all come from one process.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keeps_ids: bool = False) -> None:
        self._keeps_ids = keeps_ids
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an API process that came back is who it was
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self._homes: dict[int, tuple[bytes, int]] = {}  # API process and its id, by our id
        self._ids: dict[tuple[bytes, int], int] = {}
        self._next = 0
        self._outgoing: dict[bytes, dict[int, Output]] = {}
        self.peers: set[bytes] = set()

    def register(self, poller: zmq.Poller) -> None:
        """Let `poller` wake when something has come."""
        poller.register(self._socket, zmq.POLLIN)

    def received(self) -> Iterator[tuple[bytes, Message]]:
        """What has come, and from which API process."""
        while True:
            try:
                peer, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.peers.add(peer)
            yield peer, read_request(data)

    def open(self, peer: bytes, their_id: int) -> int:
        """Our id for a new request."""
        id, self._next = their_id if self._keeps_ids else self._next, self._next + 1
        self._homes[id] = peer, their_id
        self._ids[peer, their_id] = id
        return id

    def known(self, peer: bytes, their_id: int) -> int | None:
        """Our id for a request of an API process; None once it was forgotten."""
        return self._ids.get((peer, their_id))

    def of(self, peer: bytes) -> list[int]:
        """Our ids for what is open of an API process."""
        return [id for id, (home, _) in self._homes.items() if home == peer]

    def forget(self, id: int) -> None:
        """Nothing more will be said of request `id`."""
        if (home := self._homes.pop(id, None)) is not None:
            del self._ids[home]

    def give(self, id: int, tokens: list[int], logprobs: list[Logprob] | None = None) -> None:
        """Tokens of request `id`, to be sent by `flush`."""
        if (output := self._output(id)) is not None:
            output.tokens += tokens
            if logprobs is not None:
                output.logprobs = (output.logprobs or []) + logprobs

    def end(self, id: int, finish: str, reason: str = "", status: int = 0) -> None:
        """How request `id` ended, to be sent by `flush`."""
        if (output := self._output(id)) is not None:
            output.finish, output.reason, output.status = finish, reason, status

    def flush(self, due_ns: int) -> None:
        """Send what was given since, which should leave at `due_ns`."""
        outgoing, self._outgoing = self._outgoing, {}
        for peer, outputs in outgoing.items():
            self.send(peer, Outputs(due_ns, list(outputs.values())))
            for id in [id for id, output in outputs.items() if output.finish in ("refused", "cut")]:
                self.forget(id)

    def send(self, peer: bytes, message: From) -> None:
        """One message to one API process; one that is gone misses it."""
        self._socket.send_multipart([peer, encode(message)])

    def _output(self, id: int) -> Output | None:
        if (home := self._homes.get(id)) is None:
            return None
        peer, their_id = home
        outputs = self._outgoing.setdefault(peer, {})
        output = outputs.get(id)
        if output is None:
            output = outputs[id] = Output(their_id, [])
        return output

    def close(self) -> None:
        self._socket.close()
