"""The trace format of this project: a Parquet file with one row per request, which stores every field exactly.

Files are read and written in row groups of `tokentwin.traces.formats.request_table`. Fields of the whole workload
(name, concurrency, and whether prefixes are shared) are in the schema's metadata, because a file without requests has
no rows that could hold them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.distributions import LATEST_NS, LONGEST, TOO_LATE
from tokentwin.traces.formats.items import items_of, wrong_item
from tokentwin.traces.formats.request_table import LATER, ROW_GROUP, SCHEMA, SOMETIMES, WHOLE, RequestTable, batch_of

MAGIC = b"PAR1"
_PRIORITIES = 2**31  # limit of a priority's absolute value, because recordings store 32 bits

_WORKLOAD = b"tokentwin.workload"
# Fields of a workload that say which of its requests are sent and counted, with the value that counts all.
_COUNTED: dict[str, int | None] = {"warm_up_ns": 0, "warm_up_requests": 0, "until_ns": None}


def arrow_reason(error: Exception) -> str:
    """Return the reason of a file error, without the details of the system call that pyarrow adds."""
    return reason(error).partition(" Detail:")[0].strip(" .\n")


class ParquetReader:
    """A reader of this project's trace format. See `tokentwin.traces.formats.trace_file.TraceReader`."""

    name = "parquet"

    def matches(self, head: bytes) -> bool:
        return head.startswith(MAGIC)

    def read(self, path: Path) -> Workload:
        """Return the workload in `path`. The file is checked completely now, and read by row groups on each use."""
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise UserError("trace", str(path), f"is not a readable Parquet file: {arrow_reason(error)}") from None
        with file:
            about = _about(path, file.schema_arrow)
            try:
                _check(path, file)
            except MemoryError:
                raise UserError("trace", str(path), "needs more memory than this machine has") from None
            except (pa.ArrowException, OSError) as error:
                raise UserError("trace", str(path), f"is damaged: {arrow_reason(error)}") from None
            return Workload(
                requests=RequestTable(file.metadata.num_rows, partial(_stored_batches, path)),
                name=about["name"],
                concurrency=about["concurrency"],
                shares_prefixes=about["shares_prefixes"],
                warm_up_ns=about["warm_up_ns"],
                warm_up_requests=about["warm_up_requests"],
                until_ns=about["until_ns"],
            )


def write_parquet(workload: Workload, path: str | Path) -> None:
    """Write `workload` to `path` in row groups of 8192 rows. Reading the file returns an equal workload."""
    counted = {name: getattr(workload, name) for name in _COUNTED}
    how = workload.concurrency, workload.shares_prefixes
    with WorkloadWriter(path, workload.name, *how, **counted) as writer:
        for request in workload.requests:
            writer.add(request)


class WorkloadWriter:
    """A writer of a workload's requests, which come one by one in the order `(arrival_ns, id)`.

    `counted` are the fields of the workload that say which requests count (`_COUNTED`).
    `close` or the end of the context completes the file.
    """

    def __init__(
        self, path: str | Path, name: str, concurrency: int | None, shares_prefixes: bool, **counted: int | None
    ) -> None:
        about = {"version": 1, "name": name, "concurrency": concurrency, "shares_prefixes": shares_prefixes}
        about |= {name: value for name, value in counted.items() if value}
        self._path = path
        self._about = {_WORKLOAD: json.dumps(about, sort_keys=True).encode()}
        self._rows: list[WorkloadRequest] = []
        self._written = False
        self._open(SCHEMA)

    def add(self, request: WorkloadRequest) -> None:
        self._rows.append(request)
        if len(self._rows) == ROW_GROUP:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and end the file."""
        self._flush()
        self._writer.close()

    def _open(self, schema: pa.Schema) -> None:
        self._schema = schema.with_metadata(self._about)
        self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")

    def _flush(self) -> None:
        if not self._rows:
            return
        names = self._schema.names
        used = [
            field for field in SOMETIMES if field.name in names or any(getattr(row, field.name) for row in self._rows)
        ]
        if len(used) > len(names) - len(SCHEMA):
            self._begin_anew(pa.schema([*SCHEMA, *used]))
        self._writer.write_batch(batch_of(self._rows, self._schema))
        self._rows.clear()
        self._written = True

    def _begin_anew(self, schema: pa.Schema) -> None:
        """Begin the file anew with the columns of `schema`; new ones are empty for the rows written so far."""
        self._writer.close()
        before = pq.read_table(self._path) if self._written else None
        self._open(schema)
        if before is not None:
            columns = [
                before[field.name]
                if field.name in before.column_names
                else pa.array([LATER[field.name]] * len(before), field.type)
                for field in schema
            ]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=ROW_GROUP)

    def __enter__(self) -> WorkloadWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        self._writer.close()


def _stored_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from _batches(file)


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most `ROW_GROUP` rows, with only the columns of this format."""
    return file.iter_batches(
        batch_size=ROW_GROUP, columns=[name for name in file.schema_arrow.names if name in WHOLE.names]
    )


def _about(path: Path, schema: pa.Schema) -> dict:
    """Check that the file is a trace of this project, and return the workload's metadata."""
    stored = (schema.metadata or {}).get(_WORKLOAD)
    if stored is None:
        remedy = "is a Parquet file, but not a tokentwin trace; the trace of a recording is its workload.parquet"
        raise UserError("trace", str(path), remedy)
    for field in WHOLE:
        index = schema.get_field_index(field.name)
        if index < 0 and field.name in LATER:
            continue
        if index < 0:
            raise UserError(f"{path}: {field.name}", None, "this column is missing; every tokentwin trace has it")
        if schema.field(index).type != field.type:
            raise UserError(f"{path}: {field.name}", str(schema.field(index).type), f"must be {field.type}")
    try:
        about = json.loads(stored)
        known = {key: about[key] for key in ("name", "concurrency", "shares_prefixes")}
        known |= {name: int(about[name]) if about.get(name) else unset for name, unset in _COUNTED.items()}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: metadata", repr(stored), "is not metadata that tokentwin wrote") from None
    return known


def _check(path: Path, file: pq.ParquetFile) -> None:
    """Check every row against the rules of a workload, in one vectorised pass over the file."""
    seen = 0
    last = (-1, -1)
    ids: list[np.ndarray] = [np.array([], np.int64)]
    outputs, used = list(ids), [np.empty((0, 3), np.int64)]
    for batch in _batches(file):
        rows = _Rows(path, seen, batch)
        id_, arrival = rows.numbers("id", least=0), rows.numbers("arrival_ns", least=0)
        rows.refuse(arrival > int(LATEST_NS), "arrival_ns", arrival, TOO_LATE)
        outputs.append(rows.numbers("output_len", least=0, most=LONGEST))
        rows.check_max_tokens(outputs[-1])
        rows.numbers("priority", least=-_PRIORITIES, most=_PRIORITIES - 1)
        rows.refuse_nulls("tenant", "slo_class")
        rows.refuse_nulls(
            *(name for name, absent in LATER.items() if absent is not None and name in batch.schema.names)
        )
        rows.check_prompts()
        rows.check_items()
        used.append(rows.outputs_used())
        before = np.concatenate([[last[0]], arrival[:-1]]), np.concatenate([[last[1]], id_[:-1]])
        late = (arrival < before[0]) | ((arrival == before[0]) & (id_ <= before[1]))
        rows.refuse(late, "arrival_ns", arrival, "rows must be sorted by (arrival_ns, id), ids unique")
        if batch.num_rows:
            last = (int(arrival[-1]), int(id_[-1]))
        ids.append(id_)
        seen += batch.num_rows
    every = np.concatenate(ids)
    order = np.argsort(every, kind="stable")
    twice = every[order][1:][np.diff(every[order]) == 0]
    if len(twice):
        raise UserError(f"{path}: id", int(twice[0]), "appears twice; ids must be unique")
    row, id_, tokens = np.concatenate(used).T
    if len(row):
        source = order[np.minimum(np.searchsorted(every, id_, sorter=order), len(order) - 1)]
        wrong = (every[source] != id_) | (source >= row) | (np.concatenate(outputs)[source] < tokens)
        if wrong.any():
            k = int(np.argmax(wrong))
            remedy = f"must name an earlier request that generates at least {tokens[k]} tokens"
            raise UserError(f"{path}: row {row[k]}: prompt", f"out:{id_[k]}", remedy)


class _Rows:
    """A batch of rows to check. It knows the position of the rows in the file, so errors can name a row."""

    def __init__(self, path: Path, first: int, batch: pa.RecordBatch) -> None:
        self._path = path
        self._first = first
        self._batch = batch

    def refuse(self, wrong: np.ndarray, name: str, values: np.ndarray, remedy: str) -> None:
        """Raise UserError about the first row where `wrong` is True, if there is one."""
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UserError(f"{self._path}: row {self._first + row}: {name}", int(values[row]), remedy)

    def refuse_nulls(self, *names: str) -> None:
        for name in names:
            column = self._batch.column(name)
            if column.null_count:
                row = pc.index(pc.is_null(column), True).as_py()
                raise UserError(f"{self._path}: row {self._first + row}: {name}", None, "must not be null")

    def numbers(self, name: str, least: int, most: int | None = None) -> np.ndarray:
        """Return a column of integers; raise UserError if a value is null, below `least` or above `most`."""
        self.refuse_nulls(name)
        values: np.ndarray = self._batch.column(name).to_numpy(zero_copy_only=False)
        self.refuse(values < least, name, values, f"must be at least {least}")
        if most is not None:
            self.refuse(values > most, name, values, f"must be at most {most:,}")
        return values

    def check_max_tokens(self, outputs: np.ndarray) -> None:
        """Check that `max_tokens` is at least the length of the output in rows that have it."""
        if "max_tokens" not in self._batch.schema.names:
            return
        limits = pc.fill_null(self._batch.column("max_tokens"), LONGEST).to_numpy(zero_copy_only=False)
        self.refuse(limits < outputs, "max_tokens", limits, "must be at least output_len")
        self.refuse(limits > LONGEST, "max_tokens", limits, f"must be at most {LONGEST:,}")

    def check_prompts(self) -> None:
        """Check that every segment has 1 token or more and that the segments sum to `prompt_len`."""
        prompt_len = self.numbers("prompt_len", least=1, most=LONGEST)
        self.refuse_nulls("prompt")
        prompt = self._batch.column("prompt")
        offsets = prompt.offsets.to_numpy()
        if prompt.values.null_count or any(child.null_count for child in prompt.values.flatten()):
            raise UserError(f"{self._path}: prompt", None, "no part of a segment may be null")
        total = np.concatenate([[0], np.cumsum(prompt.values.field(1).to_numpy(zero_copy_only=False))])
        empty = np.concatenate([[0], np.cumsum(np.diff(total) < 1)])
        without = empty[offsets[1:]] > empty[offsets[:-1]]
        sums = total[offsets[1:]] - total[offsets[:-1]]
        self.refuse(without, "prompt", sums, "each segment must hold 1 token or more")
        self.refuse(sums != prompt_len, "prompt_len", prompt_len, "must be the sum of the segments")

    def check_items(self) -> None:
        """Check the items of each row that has some."""
        if "items" not in self._batch.schema.names:
            return
        column, lengths = self._batch.column("items").to_pylist(), self._batch.column("prompt_len").to_pylist()
        for row, (items, length) in enumerate(zip(column, lengths, strict=True)):
            try:
                wrong = wrong_item(items_of(items), length)
            except TypeError as error:
                wrong = str(error)
            if wrong:
                raise UserError(f"{self._path}: row {self._first + row}: items", len(items), wrong)

    def outputs_used(self) -> np.ndarray:
        """Return (row, id, tokens) of each segment that names another request's output."""
        prompt = self._batch.column("prompt")
        names = prompt.values.field(0)
        at = np.flatnonzero(pc.starts_with(names, "out:").to_numpy(zero_copy_only=False))
        texts = pc.utf8_slice_codeunits(names.take(at), 4)
        row = self._first + np.searchsorted(prompt.offsets.to_numpy(), at, side="right") - 1
        numeric = pc.match_substring_regex(texts, "^[0-9]{1,19}$").to_numpy(zero_copy_only=False)
        if not numeric.all():
            k = int(np.argmin(numeric))
            remedy = "must have the id of a request after `out:`"
            raise UserError(f"{self._path}: row {row[k]}: prompt", names[int(at[k])].as_py(), remedy)
        tokens = prompt.values.field(1).to_numpy(zero_copy_only=False)[at]
        return np.column_stack([row, texts.cast(pa.int64()).to_numpy(), tokens])
