"""Requests as Arrow columns, in memory or in a file: a million need little memory, and objects are made on each pass.

The prompt is a list of `{segment, tokens}`. A table in memory may lack columns: a request then has the field's default,
and a prompt of `prompt_len` private tokens if there is no column `prompt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise, repeat
from operator import attrgetter
from typing import Any, Self

import numpy as np
import pyarrow as pa

from tokentwin.serving.workload import PRIVATE, Segment, WorkloadRequest, shares_prefixes
from tokentwin.traces.formats.items import items_of

ROW_GROUP = 8192
_SEGMENT = pa.struct([pa.field("segment", pa.string(), nullable=False), pa.field("tokens", pa.int64(), nullable=False)])


def _field(name: str, type_: pa.DataType, unit: str, definition: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable, metadata={"unit": unit, "definition": definition})


SCHEMA = pa.schema(
    [
        _field("id", pa.int64(), "", "id of the request, unique in the workload"),
        _field("arrival_ns", pa.int64(), "ns", "intended arrival, from the start of the workload"),
        _field("prompt", pa.list_(pa.field("item", _SEGMENT, nullable=False)), "", "segments of the prompt"),
        _field("prompt_len", pa.int64(), "tokens", "length of the prompt: the sum of its segments"),
        _field("output_len", pa.int64(), "tokens", "tokens that it generates"),
        _field("priority", pa.int64(), "", "smaller is more urgent"),
        _field("tenant", pa.string(), "", "tenant, or empty"),
        _field("slo_class", pa.string(), "", "SLO class, or empty"),
        _field("session", pa.string(), "", "conversation it is a turn of, or empty"),
        _field("turn", pa.int64(), "", "which turn, from 0"),
        _field("think_ns", pa.int64(), "ns", "from the end of the turn before; null: it comes at arrival_ns", True),
        _field("cancel_ns", pa.int64(), "ns", "when its client hangs up, if it still waits; null: it never does", True),
        _field("structured", pa.bool_(), "", "whether its answer keeps to a grammar"),
        _field(
            "stop_ns", pa.int64(), "ns", "when a stop string ends its answer, if nothing has; null: none does", True
        ),
        _field("skip_reading_prefix_cache", pa.bool_(), "", "whether all of its prompt is computed, cached or not"),
        _field("grammar_compile_ns", pa.int64(), "ns", "how long its grammar is compiled; until then it waits"),
        _field("max_tokens", pa.int64(), "tokens", "most it may generate; null: as many as output_len", True),
    ]
)
_ITEM = pa.struct(
    [
        pa.field(name, type_, nullable=False)
        for name, type_ in (
            ("offset", pa.int64()), ("tokens", pa.int64()), ("content", pa.string()), ("kind", pa.string()),
            ("frames", pa.int64()),
        )
    ]
)  # fmt: skip
# Columns that only traces whose requests use them have.
SOMETIMES = (
    _field("adapter", pa.string(), "", "LoRA adapter that answers it, or empty"),
    _field("items", pa.list_(pa.field("item", _ITEM, nullable=False)), "", "images, videos and audio in the prompt"),
    _field("changes_logits", pa.bool_(), "", "whether penalties, a bias or other rules change its logits"),
    _field("scores_prompt", pa.bool_(), "", "whether log-probabilities of its prompt are wanted"),
)
WHOLE = pa.schema([*SCHEMA, *SOMETIMES])
# Columns that a table may lack, and the values that stand for them: those of a field that is not given.
LATER = {
    "session": "", "turn": 0, "think_ns": None, "cancel_ns": None, "structured": False, "stop_ns": None,
    "skip_reading_prefix_cache": False, "grammar_compile_ns": 0, "max_tokens": None, "adapter": "",
    "items": (), "changes_logits": False, "scores_prompt": False,
}  # fmt: skip
_ABSENT = {"priority": 0, "tenant": "", "slo_class": "", **LATER}


class RequestTable:
    """The requests in Arrow batches, which `batches` returns anew for each pass. Each pass makes new objects."""

    def __init__(self, count: int, batches: Callable[[], Iterable[pa.RecordBatch]]) -> None:
        self._count = count
        self._batches = batches

    @classmethod
    def in_memory(cls, table: pa.Table) -> Self:
        """Return the requests in `table`, sorted by `(arrival_ns, id)`; without ids they are numbered in this order."""
        numbers = np.arange(len(table))
        ids = table["id"].to_numpy() if "id" in table.column_names else numbers
        order = np.lexsort([ids, table["arrival_ns"].to_numpy()])
        if (order[1:] < order[:-1]).any():  # most traces are in order, and a copy needs memory
            table = table.take(order)
        if ids is numbers:
            table = table.append_column("id", pa.array(numbers))
        return cls(len(table), partial(table.to_batches, ROW_GROUP))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WorkloadRequest]:
        for batch in self._batches():
            fields = [_values(batch, name) for name in ("output_len", *_ABSENT)]
            keys = batch.column("id").to_pylist(), batch.column("arrival_ns").to_pylist()
            for id_, arrival_ns, prompt, *rest in zip(*keys, self._prompts(batch), *fields, strict=False):
                yield WorkloadRequest(id_, arrival_ns, prompt, *rest)

    def share_prefixes(self) -> bool:
        """Return whether any request could reuse tokens of another. See `serving.workload.shares_prefixes`."""
        return any("prompt" in batch.schema.names for batch in self._batches()) and shares_prefixes(self)

    def _prompts(self, batch: pa.RecordBatch) -> Iterable[tuple[Segment, ...]]:
        if "prompt" not in batch.schema.names:
            return [((PRIVATE, tokens),) for tokens in batch.column("prompt_len").to_pylist()]
        prompt = batch.column("prompt")
        segments = list(zip(*(part.to_pylist() for part in prompt.flatten().flatten()), strict=True))
        ends = (prompt.offsets.to_numpy() - prompt.offsets[0].as_py()).tolist()  # a slice's begin later
        return [tuple(segments[begin:end]) for begin, end in pairwise(ends)]


def _values(batch: pa.RecordBatch, name: str) -> Iterable[Any]:
    if name not in batch.schema.names:
        return repeat(_ABSENT[name])
    values = batch.column(name).to_pylist()
    return map(items_of, values) if name == "items" else values


def table_of(requests: Iterable[WorkloadRequest]) -> pa.Table:
    """Return a table with every column of the requests, whose order stays."""
    rest, batches = iter(requests), []
    while rows := list(islice(rest, ROW_GROUP)):
        batches.append(batch_of(rows, WHOLE))
    return pa.Table.from_batches(batches, WHOLE)


def batch_of(rows: list[WorkloadRequest], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of `schema` of some requests."""
    # Flat arrays and offsets are used because a list of dicts for each prompt would cost ten times as much.
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row.prompt) for row in rows], out=offsets[1:])
    segments = pa.StructArray.from_arrays(
        [
            pa.array([name for row in rows for name, _ in row.prompt], pa.string()),
            pa.array([tokens for row in rows for _, tokens in row.prompt], pa.int64()),
        ],
        fields=list(_SEGMENT),
    )
    prompts = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), segments, type=schema.field("prompt").type)
    columns = [
        prompts if field.name == "prompt" else pa.array(_column(rows, field.name), field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(rows: list[WorkloadRequest], name: str) -> list[object]:
    if name == "items":
        return [[item._asdict() for item in row.items] for row in rows]
    return list(map(attrgetter(name), rows))
