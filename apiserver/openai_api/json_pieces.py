"""JSON that is written in pieces, so that a long answer is never whole in memory and other requests get their turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

PIECE = 1 << 16  # bytes from which a piece is written

encode = msgspec.json.encode


def json_pieces(document: Any) -> Iterator[bytes]:
    """Yield `document` as JSON in pieces of about 64 KB; the last one is shorter.

    In place of a list there may be an iterator, whose items are made only when they are written.
    """
    piece = bytearray()
    for part in _parts(document):
        piece += part
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _parts(value: Any) -> Iterator[bytes]:
    before = b""
    if isinstance(value, dict):
        yield b"{"
        for name, one in value.items():
            yield before + encode(name) + b":"
            yield from _parts(one)
            before = b","
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield b"["
        for one in value:
            yield before
            yield from _parts(one)
            before = b","
        yield b"]"
    elif isinstance(value, Iterator):
        yield b"["
        for one in value:
            yield before + encode(one)
            before = b","
        yield b"]"
    else:
        yield encode(value)
