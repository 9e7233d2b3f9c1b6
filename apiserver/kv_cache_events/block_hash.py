"""vLLM's hashes of KV blocks; a block's hash is computed from its tokens and the hash of the block before it.

The hashes follow vLLM 0.33, `vllm/v1/core/kv_cache_utils.py`, for text without adapters and salts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal

Algorithm = Literal["sha256", "sha256_cbor"]

DEFAULT_SEED = "vllm-none-hash"  # vLLM's own seed if PYTHONHASHSEED is not set


class BlockHash:
    """The hash function of blocks: `algorithm` is vLLM's `prefix_caching_hash_algo`, `seed` its `PYTHONHASHSEED`."""

    def __init__(self, algorithm: Algorithm, seed: str) -> None:
        self._encode: Callable[[Any], bytes] = _pickled if algorithm == "sha256" else _cbor
        self._root = self._hash(seed)

    def hash_block(self, parent: bytes | None, tokens: Sequence[int], extra: tuple[str] | None = None) -> bytes:
        """Return the hash of a full block of `tokens`; `parent` is the hash of the block before it, if there is one."""
        return self._hash((parent or self._root, tuple(tokens), extra))

    def _hash(self, value: Any) -> bytes:
        return sha256(self._encode(value)).digest()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    """Return the canonical CBOR (RFC 8949, 4.2.1) of the values that `BlockHash` hashes."""
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
    """Encode the type of an item and its value or length (0 or more) in as few bytes as possible."""
    if value < 24:
        return bytes([kind << 5 | value])
    size = next(size for size in range(4) if value < 256 ** (1 << size))
    return bytes([kind << 5 | 24 + size]) + value.to_bytes(1 << size, "big")
