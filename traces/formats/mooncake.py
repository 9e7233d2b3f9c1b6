"""Mooncake traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks.

https://github.com/kvcache-ai/Mooncake. Equal ids mean equal blocks after equal prefixes. The last block may be partial.
Timestamps of the published traces are quantised to ticks of about 3 s. The reader does not change them;
`tokentwin.traces.reshape.spread_ticks` spreads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.request_table import ROW_GROUP, RequestTable
from tokentwin.traces.formats.rows import Row, json_rows, named_workload
from tokentwin.traces.formats.text_columns import NotPlain, text_blocks, times_ns, whole_numbers

BLOCK_TOKENS = 512

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_ID_TYPES = (pa.int32(), pa.int64(), pa.string())  # of a block's id, the widest last


_SCHEMAS = [
    pa.schema([*zip(_FIELDS, (time, pa.int64(), pa.int64(), pa.list_(pa.int64())), strict=True)])
    for time in (pa.int64(), pa.decimal256(76, 40))
]
_COLUMNS = ["arrival_ns", "prompt_len", "output_len", "hash_ids"]


class MooncakeReader:
    """A reader of Mooncake traces. The block with id 7 becomes the segment `("h7", 512)`. See `TraceReader`."""

    name = "mooncake"

    def matches(self, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and b'"hash_ids"' in head

    def read(self, path: Path) -> Workload:
        try:
            tables = [_plain(block) for block in text_blocks(path)]
        except NotPlain:
            rows = map(_columns, json_rows(path, *_FIELDS))
            tables = [_table(chunk) for chunk in iter(lambda: list(islice(rows, ROW_GROUP)), [])]
        widest = max((table["hash_ids"].type.value_type for table in tables), key=_ID_TYPES.index)
        same = [table.set_column(3, "hash_ids", table["hash_ids"].cast(pa.list_(widest))) for table in tables]
        return named_workload(path, _BlockTable.in_memory(pa.concat_tables(same)))


class _BlockTable(RequestTable):
    """Requests with the ids of their prompts' blocks in the column `hash_ids`."""

    def share_prefixes(self) -> bool:
        found: list[pa.Array] = []
        for batch in self._batches():
            ids = batch.column("hash_ids")
            flat = ids.flatten()
            found.append(pc.unique(flat))
            if len(found[-1]) < len(flat):  # twice in one prompt is not shared
                rows = np.repeat(np.arange(len(ids)), np.diff(ids.offsets))
                pairs = pa.table([flat, rows], ["id", "row"]).group_by(["id", "row"]).aggregate([])
                if len(pairs) > len(found[-1]):
                    return True
        every = pa.chunked_array(found)
        return len(pc.unique(every)) < len(every)

    def _prompts(self, batch: pa.RecordBatch) -> Iterator[tuple[Segment, ...]]:
        ids = batch.column("hash_ids")
        names = pc.binary_join_element_wise("h", ids.flatten().cast(pa.string()), "").to_pylist()
        whole = [(name, BLOCK_TOKENS) for name in names]
        ends = (ids.offsets.to_numpy() - ids.offsets[0].as_py()).tolist()
        for (begin, end), length in zip(pairwise(ends), batch.column("prompt_len").to_pylist(), strict=True):
            rest = length - (end - begin - 1) * BLOCK_TOKENS
            yield (*whole[begin : end - 1], (names[end - 1], rest))


def _plain(block: bytes) -> pa.Table:
    """Return the columns of lines that are plain: an object with the four fields on each line, and nothing else."""
    block = block.rstrip() if block.endswith((b"\n\n", b"\r\n")) else block.removesuffix(b"\n")
    for schema in _SCHEMAS:
        try:
            table = pyarrow.json.read_json(
                pa.BufferReader(block),
                pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
                pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
            )
        except pa.ArrowException:
            continue  # the times may have decimals
        break
    else:
        raise NotPlain
    times, lengths, outputs, ids = table.select(_FIELDS).columns
    texts = pa.types.is_decimal(times.type) and block.count(b'"') > 2 * len(_FIELDS) * len(table)
    if texts or len(table) != block.count(b"\n") + 1:  # Arrow takes a text for a decimal, and a line of several objects
        raise NotPlain
    if any(chunk.null_count or chunk.flatten().null_count for chunk in ids.chunks):
        raise NotPlain
    lengths = whole_numbers(lengths, 1, LONGEST)
    blocks = pc.list_value_length(ids).to_numpy()
    if (blocks != -(-lengths.to_numpy() // BLOCK_TOKENS)).any():
        raise NotPlain
    with suppress(pa.ArrowInvalid):  # they are most of the memory
        ids = ids.cast(pa.list_(pa.int32()))
    return pa.table([times_ns(times, 1_000_000), lengths, whole_numbers(outputs, 0, LONGEST), ids], _COLUMNS)


def _columns(row: Row) -> tuple[int, int, int, list[int]]:
    arrival_ns, length = row.time_ns("timestamp", 1_000_000), row.tokens("input_length")
    ids = row.items("hash_ids")
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise row.error("hash_ids", f"{len(ids)} ids", f"must have {blocks} entries for input_length {length}")
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int):
            raise row.error("hash_ids", id_, "must hold whole numbers only")
    return arrival_ns, length, row.output_tokens("output_length"), ids


def _table(rows: list[tuple[int, int, int, list[int]]]) -> pa.Table:
    *numbers, ids = zip(*rows, strict=True)
    try:
        column = pa.array(ids, pa.list_(pa.int64()))
    except (OverflowError, pa.ArrowInvalid):  # they have more than 64 bits
        column = pa.array([[*map(str, row)] for row in ids], pa.list_(pa.string()))
    return pa.table([*(pa.array(column, pa.int64()) for column in numbers), column], _COLUMNS)


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
