"""The names that vLLM gives to KV blocks: a block's tokens, hashed with the name of the block before it.

As in vLLM 0.33, `vllm/v1/core/kv_cache_utils.py`, for text without adapters or salts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

Algorithm = Literal["sha256", "sha256_cbor"]

DEFAULT_SEED = "vllm-none-hash"  # vLLM's own, where PYTHONHASHSEED is not set


class BlockHash:
    """Hashes blocks by `algorithm`, one of vLLM's `prefix_caching_hash_algo`; `seed` is its `PYTHONHASHSEED`."""

    def __init__(self, algorithm: Algorithm, seed: str) -> None:
        self._encode: Callable[[Any], bytes] = _pickled if algorithm == "sha256" else _cbor
        self._root = self._hash(seed)

    def of(self, parent: bytes | None, tokens: Sequence[int]) -> bytes:
        """The hash of a full block of `tokens`; `parent` is that of the block before it, None for the first."""
        return self._hash((parent or self._root, tuple(tokens), None))

    def _hash(self, value: Any) -> bytes:
        return sha256(self._encode(value)).digest()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2.1) of what `BlockHash` hashes."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _head(0, value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            return _head(3, len(value.encode())) + value.encode()
        case _:
            return _head(4, len(value)) + b"".join(map(_cbor, value))


@lru_cache(1 << 16)
def _head(kind: int, value: int) -> bytes:
    """The kind of an item with its value or its length, which is not negative, in the fewest bytes."""
    if value < 24:
        return bytes([kind << 5 | value])
    size = next(size for size in range(4) if value < 256 ** (1 << size))
    return bytes([kind << 5 | 24 + size]) + value.to_bytes(1 << size, "big")
