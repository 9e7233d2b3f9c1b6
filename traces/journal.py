"""A journal of the rows of a growing recording, so that a process that is killed loses none of them.

A Parquet file cannot be read before it is complete. A journal can: entry by entry, up to the entry that was being
written. It is deflated, since a step has mostly the rows of the step before.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_HEAD = 4  # bytes of an entry's length field
_PIECE = 1 << 20


class Journal:
    """A writer of entries to `path`. Its methods raise OSError when there is no more room."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._deflate = zlib.compressobj(1)
        self._encode = msgspec.msgpack.Encoder().encode

    def add(self, *entry: Any) -> None:
        """Write an entry; the operating system has it when this returns."""
        data = self._encode(entry)
        deflate = self._deflate
        packed = deflate.compress(len(data).to_bytes(_HEAD, "big") + data) + deflate.flush(zlib.Z_SYNC_FLUSH)
        if self._file.write(packed) != len(packed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()


def entries(path: Path) -> Iterator[list[Any]]:
    """Yield the entries of a journal, without an entry that was not written to its end."""
    inflate, decode, rest = zlib.decompressobj(), msgspec.msgpack.Decoder().decode, b""
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            rest += inflate.decompress(piece)
            at = 0
            while len(rest) >= at + _HEAD:
                end = at + _HEAD + int.from_bytes(rest[at : at + _HEAD], "big")
                if end > len(rest):
                    break
                yield decode(rest[at + _HEAD : end])
                at = end
            rest = rest[at:]
