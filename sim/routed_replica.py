"""A real replica, as its router knows it from the requests that it has sent and the answers that came back."""

from __future__ import annotations

from typing import Any, cast

from tokentwin.sim.replica import LoadListener, Replica


class RoutedReplica:
    """The loads of a replica for routers, in place of a `sim.replica.Replica`, counted outside its engine process.

    Attributes:
        outstanding_requests: number of requests that were sent to it and are not known to have ended
        outstanding_tokens: number of prompt and output tokens of these requests
        known_tokens: number of prompt tokens and of received output tokens of these requests
        queued_requests: number of these requests of which no token was received yet
        kv_tokens: number of tokens that fit into its KV blocks
    """

    def __init__(self, index: int, kv_tokens: int) -> None:
        self.index = index
        self.kv_tokens = kv_tokens
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.known_tokens = 0
        self.queued_requests = 0
        self.listeners: list[LoadListener] = []
        self._open: dict[int, list[int]] = {}  # by id: prompt tokens, output tokens, received tokens

    @property
    def as_replica(self) -> Replica:
        """This object, typed as the `Replica` that routers and replica sets expect."""
        return cast(Replica, cast(Any, self))

    def takes(self, id: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that was sent to the replica."""
        self._open[id] = [prompt_tokens, output_tokens, 0]
        self.outstanding_requests += 1
        self.outstanding_tokens += prompt_tokens + output_tokens
        self.known_tokens += prompt_tokens
        self.queued_requests += 1
        for listener in self.listeners:
            listener.load_grew(self.as_replica)

    def got(self, id: int, tokens: int) -> None:
        """Count `tokens` more received tokens of a request; do nothing if it has ended."""
        if not tokens or (request := self._open.get(id)) is None:
            return
        self.queued_requests -= not request[2]
        request[2] += tokens
        self.known_tokens += tokens

    def loses(self, id: int) -> None:
        """Remove a request that is known to have ended."""
        prompt_tokens, output_tokens, got = self._open.pop(id)
        self.outstanding_requests -= 1
        self.outstanding_tokens -= prompt_tokens + output_tokens
        self.known_tokens -= prompt_tokens + got
        self.queued_requests -= not got
        for listener in self.listeners:
            listener.load_shrank(self.as_replica)
