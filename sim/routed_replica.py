"""A replica on the wall clock, as its router knows it from requests sent and answers heard."""

from __future__ import annotations

from typing import Any, cast

from sim.replica import LoadListener, Replica


class RoutedReplica:
    """The loads of a `sim.replica.Replica` for routers, counted outside of its engine process.

    Attributes:
        outstanding_requests: requests that were sent to it and have not ended, as far as was heard
        outstanding_tokens: their prompt and output tokens
        known_tokens: their prompt tokens and the tokens they have got, as far as was heard
        queued_requests: number of them that have no token yet
        kv_tokens: tokens that fit into its KV blocks
    """

    def __init__(self, index: int, kv_tokens: int) -> None:
        self.index = index
        self.kv_tokens = kv_tokens
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self.known_tokens = 0
        self.queued_requests = 0
        self.listeners: list[LoadListener] = []
        self._open: dict[int, list[int]] = {}  # id: prompt tokens, output tokens, tokens it has got

    @property
    def as_replica(self) -> Replica:
        """The same object, typed as routers and their sets name it."""
        return cast(Replica, cast(Any, self))

    def takes(self, id: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that was sent to the replica."""
        self._open[id] = [prompt_tokens, output_tokens, 0]
        self.outstanding_requests += 1
        self.outstanding_tokens += prompt_tokens + output_tokens
        self.known_tokens += prompt_tokens
        self.queued_requests += 1
        for listener in self.listeners:
            listener.loaded(self.as_replica)

    def got(self, id: int, tokens: int) -> None:
        """Count `tokens` more tokens of a request, if any; do nothing if it has ended."""
        if not tokens or (request := self._open.get(id)) is None:
            return
        self.queued_requests -= not request[2]
        request[2] += tokens
        self.known_tokens += tokens

    def loses(self, id: int) -> None:
        """Drop a request that was heard to have ended."""
        prompt_tokens, output_tokens, got = self._open.pop(id)
        self.outstanding_requests -= 1
        self.outstanding_tokens -= prompt_tokens + output_tokens
        self.known_tokens -= prompt_tokens + got
        self.queued_requests -= not got
        for listener in self.listeners:
            listener.lightened(self.as_replica)
