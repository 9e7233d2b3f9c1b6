"""The simple format, for traces made by hand or by a script: CSV with a header and commas or semicolons, or JSON lines.

The required fields are one of `arrival_s`, `arrival_ms`, `arrival_ns` and `timestamp`, and `prompt_tokens` and
`output_tokens` (0: a pooling request, for an embedding or a score). Optional fields are `id` (default: the index of the
line, from 0), `tenant`, `priority`, `slo_class`, `adapter` (a LoRA adapter) and `max_tokens` (the limit of an answer
that ended earlier with a stop token). JSON lines may have `prompt` instead of `prompt_tokens`. It is a list of
segments, such as `[["sys0", 400], ["", 35]]`. An empty name stands for private tokens, and `["out:12", 80]` stands for
the first 80 output tokens of request 12. They may also have `items`, the images, videos and audio in the prompt, such
as `[{"offset": 12, "tokens": 576}]`; `content`, `kind` and `frames` are optional (`tokentwin.serving.workload.Item`).

A `timestamp` is an ISO 8601 date and time, or a number of seconds such as a Unix time; `timestamp_ms`, `timestamp_us`
and `timestamp_ns` are numbers of smaller units. The first arrival is then time 0. Columns may have the usual names of
`tokentwin.traces.formats.columns`, or names that the caller states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Item, Segment, Workload, WorkloadRequest
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.columns import Columns
from tokentwin.traces.formats.items import items_of, wrong_item
from tokentwin.traces.formats.request_table import RequestTable, table_of
from tokentwin.traces.formats.rows import Row, csv_rows, json_rows, named_workload, since_first
from tokentwin.traces.formats.text_columns import (
    NotPlain,
    are_dates,
    csv_batches,
    filled,
    instants_ns,
    texts,
    times_ns,
    whole_numbers,
)

_TIMESTAMP = "timestamp"
_TIMESTAMPS = {_TIMESTAMP: 1_000_000_000, "timestamp_ms": 1_000_000, "timestamp_us": 1000, "timestamp_ns": 1}
_ARRIVALS = {"arrival_s": 1_000_000_000, "arrival_ms": 1_000_000, "arrival_ns": 1, **_TIMESTAMPS}
_REST = ("id", "prompt_tokens", "output_tokens", "priority", "tenant", "slo_class", "adapter", "max_tokens")
FIELDS = (*_ARRIVALS, *_REST)
_USUAL = Columns({}, FIELDS)


class SimpleCsvReader:
    """A reader of CSV files with a header that names the fields of a request."""

    name = "simple CSV"

    def matches(self, head: bytes) -> bool:
        """Return True for text with a comma or semicolon in its first line: an error can name a wrong header."""
        return b"\x00" not in head and not {*b",;"}.isdisjoint(head.lstrip().splitlines()[0])

    def read(self, path: Path, columns: Columns = _USUAL) -> Workload:
        try:
            table, timestamps = _plain(path, columns)
        except NotPlain:
            return _of_rows(path, csv_rows(path, *FIELDS, columns=columns))
        return named_workload(path, RequestTable.in_memory(since_first(path, table) if timestamps else table))


class SimpleJsonReader:
    """A reader of JSON lines: one object with the fields of a request per line."""

    name = "simple JSON lines"

    def matches(self, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")

    def read(self, path: Path, columns: Columns = _USUAL) -> Workload:
        return _of_rows(path, json_rows(path, *FIELDS, "prompt", "items", columns=columns))


def read_with_columns(path: Path, head: bytes, stated: Mapping[str, str]) -> Workload:
    """Read CSV or JSON lines that begin with `head`, whose columns are `stated` by field.

    Raises UserError for another format, an unknown field, and a column that is not there.
    """
    columns = Columns(stated, FIELDS)
    for reader in (SimpleJsonReader(), SimpleCsvReader()):
        if reader.matches(head):
            return reader.read(path, columns)
    raise UserError("columns", str(path), "has no columns, because it is neither CSV nor JSON lines; leave them out")


def _plain(path: Path, columns: Columns) -> tuple[pa.Table, bool]:
    """Return the requests of a plain CSV file in its order, and whether their times are timestamps."""
    tables, arrival = [], ""
    for cells in csv_batches(path, *FIELDS, columns=columns):
        arrival, *more = [field for field in _ARRIVALS if field in cells] or [""]
        if more or not {arrival, "prompt_tokens", "output_tokens"} <= cells.keys():
            raise NotPlain
        dates = arrival == _TIMESTAMP and are_dates(cells[arrival])
        fields = {
            "arrival_ns": instants_ns(cells[arrival]) if dates else times_ns(cells[arrival], _ARRIVALS[arrival]),
            "prompt_len": whole_numbers(cells["prompt_tokens"], 1, LONGEST),
            "output_len": whole_numbers(cells["output_tokens"], 0, LONGEST),
        }
        fields |= {name: texts(cells[name]) for name in ("tenant", "slo_class", "adapter") if name in cells}
        if "id" in cells:
            fields["id"] = whole_numbers(cells["id"], 0, 2**63 - 1)
        if "priority" in cells:
            fields["priority"] = whole_numbers(filled(cells["priority"], "0"), -(2**31), 2**31 - 1)
        if "max_tokens" in cells:
            limits = whole_numbers(filled(cells["max_tokens"], str(LONGEST)), 1, LONGEST)
            stated = pc.not_equal(cells["max_tokens"], "")
            below = pc.or_(pc.less(limits, fields["output_len"]), pc.equal(fields["output_len"], 0))
            if pc.any(pc.and_(stated, below)).as_py():
                raise NotPlain
            fields["max_tokens"] = pc.if_else(stated, limits, None)
        tables.append(pa.table(fields))
    table = pa.concat_tables(tables)
    if "id" not in table.column_names:
        table = table.append_column("id", pa.array(range(len(table))))
    elif len(table["id"].unique()) < len(table):
        raise NotPlain
    return table, arrival in _TIMESTAMPS


def _of_rows(path: Path, rows: Iterable[Row]) -> Workload:
    """Return the workload of the rows, which need not be sorted, because scripts merge logs."""
    lines: dict[int, int] = {}
    first: dict[bool, Row] = {}  # the first row with and without a timestamp

    def requests() -> Iterator[WorkloadRequest]:
        for row in rows:
            request = _request(row, len(lines))
            if request.id in lines:
                remedy = f"is already the id of line {lines[request.id]}; ids must be unique"
                raise row.error("id", request.id, remedy)
            lines[request.id] = row.line
            first.setdefault(not _TIMESTAMPS.keys().isdisjoint(row.fields), row)
            yield request

    table = table_of(requests())
    if len(first) == 2:
        raise first[False].error(_TIMESTAMP, None, "is missing; give every request one, or none")
    ordered = RequestTable.in_memory(since_first(path, table) if True in first else table)
    _check_outputs(path, ordered, lines)
    return named_workload(path, ordered)


def _request(row: Row, number: int) -> WorkloadRequest:
    arrivals = [field for field in _ARRIVALS if field in row.fields]
    if len(arrivals) != 1:
        raise row.error("arrival", ", ".join(arrivals), f"give exactly one of {', '.join(_ARRIVALS)}")
    prompt = _prompt(row)
    return WorkloadRequest(
        id=row.integer("id", 0) if "id" in row.fields else number,
        arrival_ns=_arrival_ns(row, arrivals[0]),
        prompt=prompt,
        output_len=row.output_tokens("output_tokens"),
        priority=row.integer("priority", -(2**31), default=0, most=2**31 - 1),
        tenant=row.text("tenant"),
        slo_class=row.text("slo_class"),
        max_tokens=_max_tokens(row),
        adapter=row.text("adapter"),
        items=_items(row, sum(tokens for _, tokens in prompt)),
    )


def _items(row: Row, prompt_len: int) -> tuple[Item, ...]:
    if "items" not in row.fields:
        return ()
    given = row.items("items")
    try:
        items = items_of(given)
    except TypeError:
        remedy = 'must be objects such as {"offset": 12, "tokens": 576, "content": "cat.jpg", "kind": "image"}'
        raise row.error("items", given, remedy) from None
    if wrong := wrong_item(items, prompt_len):
        raise row.error("items", given, wrong)
    return items


def _max_tokens(row: Row) -> int | None:
    if row.fields.get("max_tokens") in (None, ""):
        return None
    limit, outputs = row.tokens("max_tokens"), row.output_tokens("output_tokens")
    if not outputs:
        raise row.error("max_tokens", limit, "is for requests that get tokens; leave it out with output_tokens 0")
    if limit < outputs:
        raise row.error("max_tokens", limit, "must be at least output_tokens")
    return limit


def _arrival_ns(row: Row, field: str) -> int:
    if field == _TIMESTAMP and "-" in str(row.fields[field])[1:]:
        return row.instant_ns(field)
    return row.time_ns(field, _ARRIVALS[field])


def _prompt(row: Row) -> tuple[Segment, ...]:
    if "prompt" not in row.fields:
        return ((PRIVATE, row.tokens("prompt_tokens")),)
    prompt: list[Segment] = []
    for item in row.items("prompt"):
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
            raise row.error("prompt", item, 'must be a segment [name, tokens], such as ["sys0", 400]')
        name, tokens = (Row(row.path, row.line, {"prompt": part}, typed=True) for part in item)
        prompt.append((name.text("prompt"), tokens.tokens("prompt")))
    if not prompt:
        raise row.error("prompt", [], "must hold at least one segment")
    total = sum(tokens for _, tokens in prompt)
    if total > LONGEST:
        raise row.error("prompt", f"{total} tokens", f"must be at most {LONGEST:,} tokens in all")
    if "prompt_tokens" in row.fields and row.tokens("prompt_tokens") != total:
        raise row.error("prompt_tokens", row.fields["prompt_tokens"], f"must be {total}, the sum of the segments")
    return tuple(prompt)


def _check_outputs(path: Path, requests: Iterable[WorkloadRequest], lines: Mapping[int, int]) -> None:
    """Check that every segment `out:ID` names an earlier request that generates at least as many tokens."""
    generated: dict[str, int] = {}
    for request in requests:
        for name, tokens in request.prompt:
            if name.startswith("out:") and tokens > generated.get(name, 0):
                remedy = f"must name an earlier request that generates at least {tokens} tokens"
                raise Row(path, lines[request.id], {}).error("prompt", name, remedy)
        generated[f"out:{request.id}"] = request.output_len
