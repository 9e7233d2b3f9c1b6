"""Finding KV blocks by content.

A key names a whole prefix (see content.py), so the longest cached prefix is a walk that stops at the
first key that nobody holds. Two blocks with one content are not merged; the one registered first is found.
"""

from __future__ import annotations

from serving.kv.content import Content, block_keys
from serving.request import Request


class PrefixCache:
    """Which physical blocks hold which content. Whether they are referenced is the pool's business."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._blocks: dict[bytes, dict[int, None]] = {}  # key -> blocks, in order of registration
        self._key: dict[int, bytes] = {}

    def find(self, request: Request, most: int) -> list[int]:
        """Blocks that hold the leading blocks of `request`, at most `most` of them."""
        found: list[int] = []
        for key in block_keys(request, most, self._content)[:most]:
            blocks = self._blocks.get(key)
            if not blocks:
                break
            found.append(next(iter(blocks)))
        return found

    def insert(self, request: Request, first: int, last: int) -> None:
        """The request's blocks from `first` up to but not including `last` are full."""
        keys = block_keys(request, last, self._content)
        for index in range(first, last):
            block = request.blocks[index]
            self._blocks.setdefault(keys[index], {})[block] = None
            self._key[block] = keys[index]

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

    def holds(self, block: int) -> bool:
        """Whether `block` can be found."""
        return block in self._key

    def check(self) -> None:
        """Raise AssertionError unless both directions agree."""
        assert {b: k for k, blocks in self._blocks.items() for b in blocks} == self._key
