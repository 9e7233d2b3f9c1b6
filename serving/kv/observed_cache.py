"""A prefix cache that tells somebody what it holds. Only who asks for it pays for it."""

from __future__ import annotations

from serving.kv.blocks import CacheObserver
from serving.kv.prefix_cache import PrefixCache
from serving.request import Request


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
