"""A prefix cache that tells somebody what it holds. Only who asks for it pays for it."""

from __future__ import annotations

from typing import Protocol

from serving.kv.prefix_cache import PrefixCache
from serving.request import Request


class CacheObserver(Protocol):
    """Who is told which blocks can be found."""

    def stored(self, request: Request, first: int, last: int) -> None:
        """The request's blocks from `first` up to but not including `last` can be found from now on."""
        ...

    def removed(self, block: int) -> None:
        """`block`, which could be found, cannot be found any more."""
        ...


class ObservedCache(PrefixCache):
    """Takes the place of `cache`, which is still empty, and tells `observer`."""

    def __init__(self, cache: PrefixCache, observer: CacheObserver) -> None:
        super().__init__(cache._content)
        self._observer = observer

    def insert(self, request: Request, first: int, last: int) -> None:
        super().insert(request, first, last)
        self._observer.stored(request, first, last)

    def evict(self, block: int) -> None:
        if self.holds(block):
            self._observer.removed(block)
        super().evict(block)
