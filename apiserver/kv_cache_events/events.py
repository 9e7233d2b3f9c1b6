"""Events about a replica's KV blocks in vLLM's format, for routers that track which replicas have which prefixes.

The events are vLLM 0.33's (`vllm/distributed/kv_events.py`, `vllm/v1/core/block_pool.py`): one `BlockStored` for the
blocks of a request that a step has filled, and one `BlockRemoved` for each block that is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokentwin.apiserver.kv_cache_events.block_hash import BlockHash
from tokentwin.apiserver.settings import KvEventSettings
from tokentwin.serving.request import Request

Hash = bytes | int

_GPU = "GPU"


class _Event(msgspec.Struct, tag=True):
    """An event. Fields that do not apply here have vLLM's default values."""


class BlockStored(_Event):
    """Full blocks with the tokens `token_ids`, which follow the block `parent_block_hash` in this order."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str] | None]
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(_Event):
    """Blocks that were removed from the cache; if a block was stored twice, one copy may still be there."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int = 0


class AllBlocksCleared(_Event):
    """An event which states that the cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_POSITIONS = {BlockStored: 8, BlockRemoved: 2, AllBlocksCleared: 0}

_encode = msgspec.msgpack.Encoder().encode


class KvEvents:
    """The events of one replica's prefix cache.

    `tokens` returns the tokens of a request between two positions, and `salt` its salt, of which vLLM makes the first
    block's extra key.
    """

    def __init__(
        self,
        settings: KvEventSettings,
        block_size: int,
        tokens: Callable[[Request, int, int], Sequence[int]],
        salt: Callable[[Request], str] = lambda request: "",
    ) -> None:
        self._hash = BlockHash(settings.hash, settings.hash_seed)
        self._as_integers = settings.integer_hashes
        self._positional = settings.form == "positional"
        self._block_size = block_size
        self._tokens = tokens
        self._salt = salt
        self._hashes: dict[int, bytes] = {}  # hash by block
        self._events: list[Event] = []

    def stored(self, request: Request, first: int, last: int) -> None:
        size, blocks = self._block_size, request.blocks
        tokens = list(self._tokens(request, first * size, last * size))
        hash = parent = self._hashes[blocks[first - 1]] if first else None
        hashes, extras = [], list[tuple[str] | None]([None] * (last - first))
        if not first and (salt := self._salt(request)):
            extras[0] = (salt,)
        for at, extra in enumerate(extras):
            block = tokens[at * size : (at + 1) * size]
            hash = self._hashes[blocks[first + at]] = self._hash.hash_block(hash, block, extra)
            hashes.append(self._as_published(hash))
        before = None if parent is None else self._as_published(parent)
        self._events.append(BlockStored(hashes, before, tokens, size, None, _GPU, None, extras))

    def removed(self, block: int) -> None:
        self._events.append(BlockRemoved([self._as_published(self._hashes.pop(block))], _GPU))

    def cleared(self) -> None:
        """Add the event that the cache is empty."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def take(self, seconds: float) -> bytes | None:
        """Return the events since the last call as a batch stamped `seconds` since 1970; None if there are none."""
        events, self._events = self._events, []
        if not events:
            return None
        encodable: list[Any] = [_positions(event) for event in events] if self._positional else events
        return _encode([seconds, encodable, 0])

    def _as_published(self, hash: bytes) -> Hash:
        return int.from_bytes(hash[-8:], "big") if self._as_integers else hash


def _positions(event: Event) -> list[Any]:
    """Return an event as an array of its name and the fields that older vLLM events, which were arrays, had."""
    return [type(event).__name__, *msgspec.structs.astuple(event)[: _POSITIONS[type(event)]]]
