"""The order in which waiting requests are considered: first come first served, or by priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from serving.request import Request


class WaitingQueue(Protocol):
    """Waiting requests; index 0 is the head."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Request: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None:
        """A new arrival."""
        ...

    def put_back(self, request: Request) -> None:
        """A preempted request returns."""
        ...

    def remove(self, request: Request) -> None: ...


class FcfsQueue(deque[Request]):
    """Arrivals at the end, preempted requests at the front."""

    def add(self, request: Request) -> None:
        self.append(request)

    def put_back(self, request: Request) -> None:
        self.appendleft(request)

    def remove(self, request: Request) -> None:
        if self and self[0] is request:  # nearly always
            self.popleft()
        else:
            super().remove(request)


class PriorityQueue:
    """Smallest `(priority, arrival, id)` first, preempted or not. vLLM's ids are strings: "10" comes before "9"."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_urgency)

    put_back = add

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, _urgency(request), key=_urgency)]


def _urgency(request: Request) -> tuple[int, int, str]:
    return request.priority, request.arrived.arrival_ns, str(request.id)
