"""The engine process's end of the connection: it numbers requests, and sends outputs to each API process."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from tokentwin.apiserver.messages import From, Message, Output, Outputs, encode, read_request
from tokentwin.realengine.logit_rules import Logprob, PromptLogprob


class Exchange:
    """The engine process's connection to all API processes, on a ROUTER socket at `address`.

    Requests get new ids in the order of their arrival, so that no client can choose an id.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an API process that reconnects keeps its identity
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self._homes: dict[int, tuple[bytes, int]] = {}  # API process and its own id of the request, by our id
        self._ids: dict[tuple[bytes, int], int] = {}
        self._next = 0
        self._outgoing: dict[bytes, dict[int, Output]] = {}
        self.peers: set[bytes] = set()
        self.stalled_ns = 0  # time for which a twin's run has paused

    def register(self, poller: zmq.Poller) -> None:
        """Let `poller` wake when a message has come."""
        poller.register(self._socket, zmq.POLLIN)

    def received(self) -> Iterator[tuple[bytes, Message]]:
        """Yield each message that has come, with the API process that sent it."""
        while True:
            try:
                peer, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.peers.add(peer)
            yield peer, read_request(data)

    def open(self, peer: bytes, their_id: int) -> int:
        """Return our id for a new request."""
        id, self._next = self._next, self._next + 1
        self._homes[id] = peer, their_id
        self._ids[peer, their_id] = id
        return id

    def known(self, peer: bytes, their_id: int) -> int | None:
        """Return our id for a request of an API process; None if the request was forgotten."""
        return self._ids.get((peer, their_id))

    def open_ids(self, peer: bytes) -> list[int]:
        """Return our ids for the requests of an API process that were not forgotten."""
        return [id for id, (home, _) in self._homes.items() if home == peer]

    @property
    def ids(self) -> list[int]:
        """Our ids of all requests that were not forgotten."""
        return list(self._homes)

    def forget(self, id: int) -> None:
        """Forget request `id`; its further outputs are dropped."""
        if (home := self._homes.pop(id, None)) is not None:
            del self._ids[home]

    def give(self, id: int, tokens: list[int], logprobs: list[Logprob] | None = None) -> None:
        """Add new tokens of request `id` to its output; `flush` sends them."""
        if (output := self._output(id)) is not None:
            output.tokens += tokens
            if logprobs is not None:
                output.logprobs = output.logprobs or []
                output.logprobs += logprobs

    def give_prompt(self, id: int, cached: int, logprobs: list[PromptLogprob] | None = None) -> None:
        """Add what is known of the prompt of request `id` to its first output; `flush` sends it."""
        if (cached or logprobs is not None) and (output := self._output(id)) is not None:
            output.cached, output.prompt_logprobs = cached, logprobs

    def give_pooled(self, id: int, pooled: list[float]) -> None:
        """Add the result of pooling request `id` to its output; `flush` sends it."""
        if (output := self._output(id)) is not None:
            output.pooled = pooled

    def end(self, id: int, finish: str, reason: str = "", status: int = 0) -> None:
        """Note how request `id` ended; `flush` sends it."""
        if (output := self._output(id)) is not None:
            output.finish, output.reason, output.status = finish, reason, status

    def flush(self, due_ns: int) -> None:
        """Send the outputs since the last flush; they should be sent to clients at `due_ns`."""
        outgoing, self._outgoing = self._outgoing, {}
        for peer, outputs in outgoing.items():
            self.send(peer, Outputs(due_ns, list(outputs.values()), self.stalled_ns))
            for id in [id for id, output in outputs.items() if output.finish in ("refused", "cut")]:
                self.forget(id)

    def send(self, peer: bytes, message: From) -> None:
        """Send a message to one API process; if the process has ended, the message is lost."""
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
