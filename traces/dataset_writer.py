"""A writer of one growing Parquet file of a recording: rows become Arrow pieces, pieces become row groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serving.errors import UserError, reason
from traces.schema import DATASETS, arrow_schema

_ROW_GROUP = {"steps": 65_536}  # rows; pages read the groups of the other datasets one by one
_COMPRESSION = {"steps": "lz4"}  # faster than zstd: numbers are packed already, so a fifth of the time is saved
_OTHER_ROW_GROUP, _GROUP_BYTES = 8192, 1 << 23  # rows with lists are large
_PIECE = 1024  # rows kept as Python objects before they become Arrow, which is 30 times smaller


class DatasetWriter:
    """A writer of the file of dataset `name`. `keep` names the list columns to write, or None for all."""

    def __init__(self, name: str, path: Path, metadata: Mapping[str, str], keep: Collection[str] | None) -> None:
        self.name = name
        self.end_ns = 0
        self._schema = arrow_schema(name, {**metadata, "tokentwin.dataset": name})
        lists = {field.name for field in self._schema if pa.types.is_list(field.type)}
        self._dropped = lists - set(keep) if keep is not None else set()
        self._rows: list[Mapping[str, Any]] = []
        self._pieces: list[pa.Table] = []
        self._nulls: dict[str, pa.Array] = {}  # made once: most columns of `steps` are null
        self._pending = self._pending_bytes = 0
        self._row_group = _ROW_GROUP.get(name, _OTHER_ROW_GROUP)
        self._path = path
        numbers = [field.name for field in self._schema if pa.types.is_integer(field.type)]
        # No dictionary for lists: token times all differ, so theirs would take longer than everything else and be
        # larger.
        words = [field.name for field in self._schema if field.name not in lists.union(numbers)]
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression=_COMPRESSION.get(name, "zstd"),
            use_dictionary=words,
            column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),  # most columns grow from row to row
        )

    def add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _PIECE:
            self._pack()

    def add_columns(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._pack()
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"columns of {self.name} differ in length: {sorted(lengths)}")
        if columns:
            self._append(columns, lengths.pop())

    def close(self) -> None:
        self._pack()
        self._write()
        with writing(self._path.parent):
            self._writer.close()

    def abandon(self) -> None:
        """Close the file without finishing it: its content no longer matters, but its handle must be released."""
        self._rows, self._pieces = [], []
        with suppress(OSError):  # a file that could not be written cannot be finished either
            self._writer.close()
        self._writer.is_open = False  # otherwise pyarrow would try to close the file once more

    def _pack(self) -> None:
        if self._rows:
            given = {name for row in self._rows for name in row}
            rows, self._rows = self._rows, []
            self._append({name: [row.get(name) for row in rows] for name in given}, len(rows))

    def _append(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        check_columns(self.name, columns)
        given = {
            field.name: pa.array(columns[field.name], field.type)
            for field in self._schema
            if field.name in columns and field.name not in self._dropped
        }
        arrays = [given[field.name] if field.name in given else self._null(field, count) for field in self._schema]
        piece = pa.Table.from_arrays(arrays, schema=self._schema)
        for name in ("end_ns", "finish_ns"):
            if name in columns:
                self.end_ns = max(self.end_ns, pc.max(piece.column(name)).as_py() or 0)
        self._pieces.append(piece)
        self._pending += count
        self._pending_bytes += sum(array.nbytes for array in given.values())
        if self._pending >= self._row_group or self._pending_bytes >= _GROUP_BYTES:
            self._write()

    def _null(self, field: pa.Field, count: int) -> pa.Array:
        known = self._nulls.get(field.name)
        if known is None or len(known) < count:
            known = self._nulls[field.name] = pa.nulls(count, field.type)
        return known[:count]

    def _write(self) -> None:
        if self._pieces:
            with writing(self._path.parent):
                self._writer.write_table(pa.concat_tables(self._pieces), row_group_size=self._row_group)
            self._pieces, self._pending, self._pending_bytes = [], 0, 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError if something below `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError("recording", str(path), f"cannot be written: {reason(error)}") from None


def check_columns(dataset: str, columns: Collection[str]) -> None:
    """Raise KeyError for a name that is no column of `dataset`."""
    unknown = sorted(set(columns) - {c.name for c in DATASETS[dataset]})
    if unknown:
        raise KeyError(f"{dataset} has no column {', '.join(unknown)}")
