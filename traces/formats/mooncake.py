"""Mooncake traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks.

https://github.com/kvcache-ai/Mooncake. Equal ids mean equal blocks after equal prefixes. The last block may be partial.
Timestamps of the published traces are quantised to ticks of about 3 s. The reader does not change them;
`tokentwin.traces.reshape.spread_ticks` spreads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest
from tokentwin.traces.formats.rows import Row, json_rows, named_workload

BLOCK_TOKENS = 512

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class MooncakeReader:
    """A reader of Mooncake traces. The block with id 7 becomes the segment `("h7", 512)`. See `TraceReader`."""

    name = "mooncake"

    def matches(self, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and b'"hash_ids"' in head

    def read(self, path: Path) -> Workload:
        rows = [
            (row.time_ns("timestamp", 1_000_000), tuple(_segments(row)), row.output_tokens("output_length"))
            for row in json_rows(path, *_FIELDS)
        ]
        rows.sort(key=lambda row: row[0])
        return named_workload(path, [WorkloadRequest(id_, *row) for id_, row in enumerate(rows)])


def _segments(row: Row) -> Iterator[Segment]:
    length = row.tokens("input_length")
    ids = row.items("hash_ids")
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise row.error("hash_ids", f"{len(ids)} ids", f"must have {blocks} entries for input_length {length}")
    for block, id_ in enumerate(ids):
        if isinstance(id_, bool) or not isinstance(id_, int):
            raise row.error("hash_ids", id_, "must hold whole numbers only")
        yield f"h{id_}", min(BLOCK_TOKENS, length - block * BLOCK_TOKENS)


def write_mooncake(workload: Workload, path: str | Path) -> None:
    """Write `workload` as a Mooncake trace. Whole blocks get equal ids if and only if their prefixes are equal.

    The format cannot store everything. Arrivals are rounded down to milliseconds, and request ids become line numbers.
    Priority, tenant, SLO class, name and concurrency are lost, as are shared tokens at the start of a block that
    differs further on.
    """
    hashes = _ChainedHashes()
    with Path(path).open("w", encoding="utf-8") as file:
        for request in workload.requests:
            line = {
                "timestamp": request.arrival_ns // 1_000_000,
                "input_length": request.prompt_len,
                "output_length": request.output_len,
                "hash_ids": hashes.of_request(request),
            }
            file.write(json.dumps(line) + "\n")


class _ChainedHashes:
    """The ids of blocks, numbered in order of appearance as in the published traces.

    A block is identified by its parent block and its pieces `(segment, first token, number of tokens)`. A segment in a
    prompt always starts at its token 0, so different lists of pieces are always different tokens.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}
        self._next = 0

    def of_request(self, request: WorkloadRequest) -> list[int]:
        ids: list[int] = []
        parent = -1
        for pieces in _blocks(request.content):
            if any(name == PRIVATE for name, _, _ in pieces):
                parent = self._new()
            else:
                # A partial block of one piece is a prefix of the whole block, so the two may share an id, as in the
                # published traces. A block of several pieces must be equal in full.
                content = pieces[0][:2] if len(pieces) == 1 else tuple(pieces)
                key = (parent, content)
                if key not in self._ids:
                    self._ids[key] = self._new()
                parent = self._ids[key]
            ids.append(parent)
        return ids

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _blocks(prompt: tuple[Segment, ...]) -> Iterator[list[tuple[str, int, int]]]:
    pieces: list[tuple[str, int, int]] = []
    room = BLOCK_TOKENS
    for name, tokens in prompt:
        start = 0
        while start < tokens:
            length = min(room, tokens - start)
            pieces.append((name, start, length))
            start += length
            room -= length
            if not room:
                yield pieces
                pieces, room = [], BLOCK_TOKENS
    if pieces:
        yield pieces
