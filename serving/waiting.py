"""The queue of waiting requests, and the time for which they wait for others to join them.

The queue is ordered first come, first served, or by a key that is fixed at arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from serving.request import Request


class WaitingQueue(Protocol):
    """Waiting requests. Iteration goes from the head to the end; the queue must not change during iteration."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None:
        """Add a new arrival."""

    def put_back(self, request: Request) -> None:
        """Put back a preempted request."""

    def remove(self, request: Request) -> None: ...
    def steps_at_head(self, head: Request, steps: int) -> int:
        """Return for how many of the next `steps` decode steps `head` stays the first to admit, if nothing arrives.

        The simulator skips this number of steps. 0 is always a valid answer.
        """


class FcfsQueue(deque[Request]):
    """A queue with arrivals at the end and preempted requests at the front."""

    def add(self, request: Request) -> None:
        self.append(request)

    def put_back(self, request: Request) -> None:
        self.appendleft(request)

    def remove(self, request: Request) -> None:
        if self and self[0] is request:  # nearly always
            self.popleft()
        else:
            super().remove(request)

    def steps_at_head(self, head: Request, steps: int) -> int:
        return steps


class OrderedQueue:
    """A queue with the smallest `key` first, preempted or not. Keys never change, and no two requests share one."""

    def __init__(self, key: Callable[[Request], tuple[Any, ...]]) -> None:
        self._requests: list[Request] = []
        self._key = key

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    put_back = add

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, self._key(request), key=self._key)]

    def steps_at_head(self, head: Request, steps: int) -> int:
        return steps


def by_priority(request: Request) -> tuple[int, int, str]:
    """Return the sort key of vLLM's priority policy. vLLM's ids are strings, so "10" comes before "9"."""
    return request.priority, request.arrived.arrival_ns, str(request.id)


class Hold:
    """A timer of the wait for more requests: it starts when requests begin to wait so that others can join them."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    @property
    def waits(self) -> bool:
        """True if any request waits."""
        return self._since_ns is not None

    def is_over(self, now_ns: int, hold_ns: int) -> bool:
        """Return whether requests have waited for `hold_ns`; a `hold_ns` of 0 means that none of them waits."""
        if not hold_ns:
            self._since_ns = None
            return False
        if self._since_ns is None:
            self._since_ns = now_ns
        return now_ns - self._since_ns >= hold_ns
