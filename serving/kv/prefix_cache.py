"""Finding KV blocks by content.

A key names a whole prefix (see content.py), so the longest cached prefix is a walk that stops at the
first key that nobody holds. Two blocks with one content are not merged; the one registered first is found.
"""

from __future__ import annotations

from serving.kv.blocks import CacheObserver
from serving.kv.content import Content, block_keys
from serving.request import Request


class PrefixCache:
    """Which physical blocks hold which content. Whether they are referenced is the pool's business.

    observer  told of what can be found, if anybody
    """

    def __init__(self, content: Content) -> None:
        self.observer: CacheObserver | None = None
        self._content = content
        self._blocks: dict[bytes, dict[int, None]] = {}  # key -> blocks, in order of registration
        self._key: dict[int, bytes] = {}

    def insert(self, request: Request, first: int, last: int) -> None:
        """The request's blocks from `first` up to but not including `last` are full."""
        keys = block_keys(request, last, self._content)
        for index in range(first, last):
            self.put(keys[index], request.blocks[index])
        if self.observer is not None:
            self.observer.stored(request, first, last)

    def first(self, key: bytes) -> int:
        """The block registered first of those that hold `key`; 0 if there is none."""
        return next(iter(self._blocks.get(key, ())), 0)

    def put(self, key: bytes, block: int) -> None:
        """`block` is full, and holds `key`."""
        self._blocks.setdefault(key, {})[block] = None
        self._key[block] = key

    def evict(self, block: int) -> None:
        """`block` is about to hold something else."""
        key = self._key.pop(block, None)
        if key is not None:
            blocks = self._blocks[key]
            del blocks[block]
            if not blocks:
                del self._blocks[key]
            if self.observer is not None:
                self.observer.removed(block)

    def holds(self, block: int) -> bool:
        """Whether `block` can be found."""
        return block in self._key

    def check(self) -> None:
        """Raise AssertionError unless both directions agree."""
        assert {b: k for k, blocks in self._blocks.items() for b in blocks} == self._key
