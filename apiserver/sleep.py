"""Sleep and wake-up, as vLLM's `/sleep` and `/wake_up`: meanwhile requests wait, and do not reach the backend.

At level 0 only the scheduling pauses. At level 1 the weights move to host memory and the KV cache is lost, which takes
the time that the backend states, as does the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic

from tokentwin.apiserver.backend import Backend
from tokentwin.apiserver.messages import Add

Done = Callable[[], None]


class Sleep:
    """Let a server sleep; `level` is None while it is awake, or wakes up with its requests in its queue.

    `add` takes a request that has waited. `waiting` are the requests that wait, by id.
    """

    def __init__(self, backend: Backend, add: Callable[[int, Add], None], now: Callable[[], float] = monotonic) -> None:
        self.level: int | None = None
        self.waiting: dict[int, Add] = {}
        self._backend = backend
        self._add = add
        self._now = now
        self._falls = False  # True while requests are still under way
        self._until_s = inf  # end of the move of the weights
        self._wakes = False
        self._callbacks: list[Done] = []

    def begin(self, level: int, done: Done) -> None:
        """Hold further requests. Sleep when none is under way, then call `done`; a server that sleeps stays so."""
        if self.level is not None and not self._wakes:
            self._callbacks.append(done)
            return
        self.level, self._falls, self._wakes, self._until_s = level, True, False, inf
        self._callbacks.append(done)

    def end(self, done: Done) -> None:
        """Wake up, then call `done`."""
        self._callbacks.append(done)
        if self.level is not None and not self._wakes:
            self._falls, self._wakes = False, True
            self._until_s = self._now() + self._backend.moves_s(self.level)

    def turn(self, under_way: int) -> float | None:
        """Go on; return the seconds until the next call, or None if it need not be called."""
        if self._falls and not under_way and self.level is not None:
            self._falls = False
            self._until_s = self._now() + self._backend.rest(self.level)
        if self._now() >= self._until_s:
            self._until_s = inf
            if self._wakes:
                self.level, self._wakes = None, False
                requests, self.waiting = self.waiting, {}
                for id, asked in requests.items():
                    self._add(id, asked)
        moves = self._until_s < inf
        if not (self._falls or moves):
            callbacks, self._callbacks = self._callbacks, []
            for done in callbacks:
                done()
        return max(self._until_s - self._now(), 0.0) if moves else None
