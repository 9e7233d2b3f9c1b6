"""What becomes of a replica's KV blocks, in vLLM's words, for routers that know who holds which prefix.

Events as vLLM 0.33 makes them (`vllm/distributed/kv_events.py`, `vllm/v1/core/block_pool.py`): one `BlockStored` for
the blocks of a request that a step filled, one `BlockRemoved` for each block that is taken for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from apiserver.block_hash import BlockHash
from apiserver.settings import KvEventSettings
from serving.request import Request

Hash = bytes | int

_GPU = "GPU"


class _Event(msgspec.Struct, tag=True):
    """An event. What text has no part in is as vLLM says it."""


class BlockStored(_Event):
    """Full blocks that follow on `parent_block_hash`, and on each other; they hold `token_ids`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[None]
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(_Event):
    """Blocks that are in the cache no more, or once less."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int = 0


class AllBlocksCleared(_Event):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_POSITIONS = {BlockStored: 8, BlockRemoved: 2, AllBlocksCleared: 0}

_encode = msgspec.msgpack.Encoder().encode


class KvEvents:
    """Follows the prefix cache of one replica; `tokens` are those of a request, from one position to another."""

    def __init__(
        self, settings: KvEventSettings, block_size: int, tokens: Callable[[Request, int, int], Sequence[int]]
    ) -> None:
        self._hash = BlockHash(settings.hash, settings.hash_seed)
        self._as_integers = settings.integer_hashes
        self._positional = settings.form == "positional"
        self._block_size = block_size
        self._tokens = tokens
        self._hashes: dict[int, bytes] = {}  # by block
        self._events: list[Event] = []

    def stored(self, request: Request, first: int, last: int) -> None:
        size, blocks = self._block_size, request.blocks
        tokens = list(self._tokens(request, first * size, last * size))
        hash = parent = self._hashes[blocks[first - 1]] if first else None
        hashes = []
        for at in range(last - first):
            hash = self._hashes[blocks[first + at]] = self._hash.of(hash, tokens[at * size : (at + 1) * size])
            hashes.append(self._told(hash))
        before = None if parent is None else self._told(parent)
        self._events.append(BlockStored(hashes, before, tokens, size, None, _GPU, None, [None] * len(hashes)))

    def removed(self, block: int) -> None:
        self._events.append(BlockRemoved([self._told(self._hashes.pop(block))], _GPU))

    def cleared(self) -> None:
        """Nothing is in the cache any more."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def take(self, seconds: float) -> bytes | None:
        """A batch of what has happened since the last, told at this time since 1970; None if nothing has."""
        events, self._events = self._events, []
        if not events:
            return None
        told: list[Any] = [_positions(event) for event in events] if self._positional else events
        return _encode([seconds, told, 0])

    def _told(self, hash: bytes) -> Hash:
        return int.from_bytes(hash[-8:], "big") if self._as_integers else hash


def _positions(event: Event) -> list[Any]:
    """The name of an event and its fields in order, as far as vLLM's events had them while they were arrays."""
    return [type(event).__name__, *msgspec.structs.astuple(event)[: _POSITIONS[type(event)]]]
