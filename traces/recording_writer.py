"""The writer of a recording, which writes during the run.

Only one process at a time may write to a recording's directory, and only an older recording may be replaced. Row groups
are written during the run to files with temporary names. Rows are collected into Arrow pieces, and pieces into row
groups. `close` renames the files, with `runs.parquet` as the last one, so a directory with this file is a complete
recording. Until then, a server or `bench --url` also keeps a journal in the directory
(`tokentwin.traces.live_recording`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.version import __version__
from tokentwin.serving.whole_file import LOCK, DirectoryLock
from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.recording import JOURNAL, WORKLOAD, Recording, notes_of
from tokentwin.traces.schema import COLUMNS_FILE, DATASETS, arrow_schema, columns_text, recording_columns

DEPLOYMENT = "deployment.yaml"  # written with a recording of vLLM, so that users can run it again
_FORMAT = "1"
_METADATA = ("deployment", "seed", "version", "hardware", "calibration")
# rows per row group; other datasets have smaller groups, because dashboard pages read them one by one
_ROW_GROUP = {"steps": 65_536}
# lz4 takes a fifth less time than zstd, and numbers are already small by delta encoding
_COMPRESSION = {"steps": "lz4"}
_OTHER_ROW_GROUP, _GROUP_BYTES = 8192, 1 << 23  # rows with lists are large, so their groups are limited in bytes, too
# number of rows kept as Python objects before they become Arrow arrays, which take a thirtieth of the memory
_PIECE = 1024

Note = Callable[[Recording], Mapping[str, Any]]


class RecordingWriter:
    """A writer of one recording during the run; at most one row group per dataset is in memory.

    `run` has the columns of `runs` that are known at the start; `version` is filled in. `keep` has the names of list
    columns to write (`token_times_ns`, `row_ids`, ...), or is None for all; other list columns become null. As a
    context manager it closes the recording, or discards it after an exception or Ctrl-C. Raises UserError while another
    process writes to the same directory.
    """

    def __init__(
        self,
        path: str | Path,
        run: Mapping[str, Any],
        *,
        workload: Workload | None = None,
        keep: Collection[str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self._run = {"version": __version__, **run}
        _check_columns("runs", self._run)
        self._made_directory, self._lock = _claim(self.path, overwrite)
        self._open = True
        metadata = {f"tokentwin.{name}": str(self._run.get(name, "")) for name in _METADATA}
        metadata["tokentwin.recording"] = _FORMAT
        try:
            with _writing(self.path):
                if workload is not None:
                    write_parquet(workload, self._temporary(WORKLOAD))
                self._temporary(COLUMNS_FILE).write_text(columns_text(recording_columns()), encoding="utf-8")
                self._datasets = {
                    name: _DatasetWriter(name, self._temporary(f"{name}.parquet"), metadata, keep) for name in DATASETS
                }
        except BaseException:
            self._remove()
            raise

    @property
    def workload_path(self) -> Path:
        """The path for a workload that is known only during the run; `close` renames this file, too."""
        return self._temporary(WORKLOAD)

    def add_step(self, **columns: Any) -> None:
        """Add one row of `steps`; columns that are not given are null."""
        self._datasets["steps"].add(columns)

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add many rows of `steps`; `columns` has lists or arrays of one length, by column name."""
        self._datasets["steps"].add_columns(columns)

    def add_request(self, **columns: Any) -> None:
        """Add one row of `requests`; columns that are not given are null."""
        self._datasets["requests"].add(columns)

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Add many rows of `requests`; `columns` has lists or arrays of one length, by column name."""
        self._datasets["requests"].add_columns(columns)

    def close(
        self, status: str = "complete", duration_ns: int | None = None, note: Note | None = None, **run: Any
    ) -> None:
        """Finish the recording with the status `complete` or `interrupted`.

        `duration_ns` defaults to the last end of a step or finish of a request. `run` has further columns of `runs`.
        `note` gets the recording, which is complete except for notes, and returns further notes.
        """
        if not self._open:
            return
        if status not in ("complete", "interrupted"):
            raise ValueError(f"status {status!r} is neither complete nor interrupted")
        for name in ("requests", "steps"):
            self._datasets[name].close()
        if duration_ns is None:
            duration_ns = max(dataset.end_ns for dataset in self._datasets.values())
        row = {**self._run, **run, "status": status, "duration_ns": duration_ns}
        if note is not None:
            row["notes"] = json.dumps({**notes_of(row), **note(_Closing(self.path, row))}, allow_nan=False)
        self._datasets["runs"].add(row)
        self._datasets["runs"].close()
        (self.path / "runs.parquet").unlink(missing_ok=True)
        (self.path / WORKLOAD).unlink(missing_ok=True)
        for name in (COLUMNS_FILE, WORKLOAD, "requests.parquet", "steps.parquet", "runs.parquet"):
            if self._temporary(name).exists():
                self._temporary(name).replace(self.path / name)
        (self.path / JOURNAL).unlink(missing_ok=True)
        self._lock.close()
        self._open = False

    def discard(self) -> None:
        """Remove everything that this writer wrote. An older recording in the same directory stays."""
        if self._open:
            self._open = False
            for dataset in self._datasets.values():
                dataset.abandon()
            self._remove()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()  # does nothing once the recording is closed

    def _temporary(self, name: str) -> Path:
        return _temporary(self.path, name)

    def _remove(self) -> None:
        for partial in self.path.glob(".*.partial"):
            partial.unlink()
        self._lock.close()
        if self._made_directory:
            with suppress(OSError):  # another writer may have written to the directory since
                self.path.rmdir()


class _Closing(Recording):
    """A recording before it is closed: its files have temporary names, and the row of `runs` is not yet written."""

    def __init__(self, path: Path, row: Mapping[str, Any]) -> None:
        self.path = path
        self._footers = {}
        schema = arrow_schema("runs")
        self.runs = pa.table([pa.array([row.get(field.name)], field.type) for field in schema], schema=schema)

    def _file(self, dataset: str) -> Path:
        temporary = _temporary(self.path, f"{dataset}.parquet")
        return temporary if temporary.exists() else super()._file(dataset)


def check_writable(path: Path, overwrite: bool) -> None:
    """Raise UserError if a `RecordingWriter` could not begin in `path`; what is there stays."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        _, lock = _claim(path, overwrite)
        lock.close()
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _temporary(directory: Path, name: str) -> Path:
    return directory / f".{name}.partial"


def _claim(path: Path, overwrite: bool) -> tuple[bool, DirectoryLock]:
    """Check that `path` can have a recording, and lock it; the flag is True if the directory was made now."""
    made = not path.exists()
    if not made and not path.is_dir():
        raise UserError("recording", str(path), "is a file; choose a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(path, "recording")
    except OSError as error:
        raise UserError("recording", str(path), f"cannot be made: {reason(error)}") from None
    try:
        if (path / JOURNAL).exists() and not overwrite:
            remedy = "holds what a killed run recorded; `python -m tokentwin.traces.live_recording DIR` finishes it"
            raise UserError("recording", str(path), remedy)
        if (path / "runs.parquet").exists():
            if not overwrite:
                remedy = "exists; use --force (overwrite in Python) to replace it, or choose another name"
                raise UserError("recording", str(path), remedy)
        elif any(not _ours(child.name) for child in path.iterdir()):
            raise UserError("recording", str(path), "holds other files; choose another directory")
        for partial in path.glob(".*.partial"):  # left by a run that was killed
            partial.unlink()
    except BaseException:
        lock.close()
        raise
    return made, lock


def _ours(name: str) -> bool:
    known = name in (WORKLOAD, COLUMNS_FILE, JOURNAL, LOCK, DEPLOYMENT) or name.removesuffix(".parquet") in DATASETS
    return known or name.endswith(".partial")


class _DatasetWriter:
    """A writer of the file of dataset `name`; `keep` has the names of list columns to write, or is None for all."""

    def __init__(self, name: str, path: Path, metadata: Mapping[str, str], keep: Collection[str] | None) -> None:
        self.name = name
        self.end_ns = 0
        self._schema = arrow_schema(name, {**metadata, "tokentwin.dataset": name})
        lists = {field.name for field in self._schema if pa.types.is_list(field.type)}
        self._dropped = lists - set(keep) if keep is not None else set()
        self._rows: list[Mapping[str, Any]] = []
        self._pieces: list[pa.Table] = []
        self._nulls: dict[str, pa.Array] = {}  # arrays of nulls, made once, because most columns of `steps` are null
        self._pending = self._pending_bytes = 0
        self._row_group = _ROW_GROUP.get(name, _OTHER_ROW_GROUP)
        self._path = path
        numbers = [field.name for field in self._schema if pa.types.is_integer(field.type)]
        # Lists have no dictionary, because all token times differ: it would take longer than everything else, and the
        # file would be larger.
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
        with _writing(self._path.parent):
            self._writer.close()

    def abandon(self) -> None:
        """Close the file to release its handle; its content is not needed any more."""
        self._rows, self._pieces = [], []
        with suppress(OSError):  # closing fails if the file could not be written
            self._writer.close()
        self._writer.is_open = False  # otherwise pyarrow would try to close the file once more

    def _pack(self) -> None:
        if self._rows:
            given = {name for row in self._rows for name in row}
            rows, self._rows = self._rows, []
            self._append({name: [row.get(name) for row in rows] for name in given}, len(rows))

    def _append(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        _check_columns(self.name, columns)
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
            with _writing(self._path.parent):
                self._writer.write_table(pa.concat_tables(self._pieces), row_group_size=self._row_group)
            self._pieces, self._pending, self._pending_bytes = [], 0, 0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise UserError if something below `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError("recording", str(path), f"cannot be written: {reason(error)}") from None


def _check_columns(dataset: str, columns: Collection[str]) -> None:
    """Raise KeyError for a name that is not a column of `dataset`."""
    unknown = sorted(set(columns) - {c.name for c in DATASETS[dataset]})
    if unknown:
        raise KeyError(f"{dataset} has no column {', '.join(unknown)}")
