"""A recorded run: a directory of Parquet files, in the same form for the real engine and the simulator.

It has `runs.parquet` (one row), `requests.parquet`, `steps.parquet`, `columns.json` (the meaning of every column) and,
if known, `workload.parquet` (the offered requests in our trace format). `tokentwin.traces.recording_writer` writes it.

Some columns of `runs` have JSON objects. The entries that we read are checked when a recording is opened, because any
program may have written the file. Other entries are allowed and ignored.

The `notes` of a run are such an object, with facts about a recording that have no column. A run of the real engine has
`attention`, `model` and `memory`. For an MoE model it also has `experts`, with the number of experts in a layer
(`experts`) and the number of experts per token (`topk`). A simulated run has these notes, as far as they are known:

front_door  time that the API server in front of it took, as in `tokentwin.serving.front_door.FrontDoor`
gpu         the GPU whose kernel tables gave the step times
trust       `level` and `reason`, as in `tokentwin.calibration.trust`
bands       90 % bands by metric and statistic; the statistic of a single number is `value`
capacity    arrival rate beyond which requests pile up, as in `tokentwin.planning.capacity`
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from tokentwin.serving.data_file import parse_json, with_present_names
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.parquet import ParquetReader, arrow_reason
from tokentwin.traces.schema import DATASETS, arrow_schema

# For a large column, Arrow's own allocator uses fresh huge pages. Clearing them takes the system longer than Arrow
# takes to decode the column.
if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
    pa.set_memory_pool(pa.system_memory_pool())

JOURNAL = "journal"
WORKLOAD = "workload.parquet"
_READERS = 2  # number of columns that are decoded at the same time


class _Footer(NamedTuple):
    """The metadata of a dataset's file: its row groups, and its checked schema."""

    about: pq.FileMetaData
    schema: pa.Schema


class Recording:
    """A recording on disk. Opening it reads only the row of `runs`; other data are read when they are used."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._footers: dict[str, _Footer] = {}
        if not (self.path / "runs.parquet").is_file():
            remedy = "is not a recording: it has no runs.parquet"
            if (self.path / JOURNAL).is_file():
                finish = "`python -m tokentwin.traces.live_recording DIR` finishes it"
                remedy = f"was not finished: if its process was killed, {finish}"
            raise UserError("recording", str(path), remedy if self.path.is_dir() else "is not a directory")
        if self.runs.num_rows != 1:
            raise UserError(f"{self._file('runs')}: rows", self.runs.num_rows, "must be 1: a recording holds one run")
        check_objects(self.run, str(self._file("runs")))
        self._footer("requests")
        self._footer("steps")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Return the recording in directory `path`. Raises UserError if there is none or it is damaged."""
        return cls(path)

    @cached_property
    def runs(self) -> pa.Table:
        """The dataset `runs`: one row."""
        return self.table("runs")

    @cached_property
    def requests(self) -> pa.Table:
        """The dataset `requests`: one row per request, in no particular order."""
        return self.table("requests")

    @cached_property
    def steps(self) -> pa.Table:
        """The dataset `steps`: one row per engine step."""
        return self.table("steps")

    @property
    def run(self) -> dict[str, Any]:
        """The row of `runs`."""
        return self.runs.to_pylist()[0]

    def table(
        self, dataset: str, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None
    ) -> pa.Table:
        """Return a dataset, or only some of its columns or row groups; the others are not read.

        A column that a later version added is null in an older recording.
        """
        wanted = [c.name for c in DATASETS[dataset]] if columns is None else list(columns)
        about, stored = self._footer(dataset)
        kept = range(about.num_row_groups) if groups is None else groups

        def arrays(names: Sequence[str]) -> list[pa.ChunkedArray]:
            # Row groups are small. One thread without pre-buffering reads them in a third of the time.
            file = pq.ParquetFile(self._file(dataset), metadata=about, pre_buffer=False)
            group_table = file.read_row_groups(kept, names, use_threads=False)
            return [group_table.column(name) for name in names]

        read = [name for name in wanted if name in stored.names]
        # With many groups, reading column by column halves the time, because a growing column is copied less often.
        parts = [read] if len(kept) == 1 else [[name] for name in read]
        try:
            with ThreadPoolExecutor(_READERS) as readers:
                reads = readers.map(arrays, parts) if len(parts) > 1 else map(arrays, parts)
                columns = [array for part in reads for array in part]
        except (pa.ArrowException, OSError) as error:
            raise UserError("recording", str(self._file(dataset)), f"is damaged: {arrow_reason(error)}") from None
        table = pa.table(columns, schema=pa.schema([stored.field(name) for name in read], stored.metadata))
        return _with_all(table, wanted, dataset, sum(about.row_group(at).num_rows for at in kept))

    def pieces(self, dataset: str, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yield some columns of a dataset, `rows` rows at a time; only these rows are in memory."""
        about, stored = self._footer(dataset)
        read = [name for name in columns if name in stored.names]
        try:
            file = pq.ParquetFile(self._file(dataset), metadata=about, pre_buffer=False)
            for batch in file.iter_batches(rows, columns=read, use_threads=False):
                yield _with_all(pa.table(batch), columns, dataset, batch.num_rows)
        except (pa.ArrowException, OSError) as error:
            raise UserError("recording", str(self._file(dataset)), f"is damaged: {arrow_reason(error)}") from None

    def rows(self, dataset: str) -> int:
        """Return the number of rows of a dataset."""
        return int(self._footer(dataset).about.num_rows)

    def most_items(self, dataset: str, column: str) -> int:
        """Return an upper bound of the number of items in all lists of a column, from the file's statistics."""
        about, _ = self._footer(dataset)
        leaf = self._leaves(dataset).index(column)
        return sum(about.row_group(at).column(leaf).num_values for at in range(about.num_row_groups))

    def _leaves(self, dataset: str) -> list[str]:
        """Return for each Parquet leaf column the name of its column; a list of structs has several leaves."""
        about, _ = self._footer(dataset)
        return [about.schema.column(at).path.split(".")[0] for at in range(about.num_columns)]

    def group_rows(self, dataset: str) -> list[int]:
        """Return the number of rows of each row group of a dataset."""
        about, _ = self._footer(dataset)
        return [about.row_group(at).num_rows for at in range(about.num_row_groups)]

    def filled(self, dataset: str, columns: Sequence[str]) -> list[str]:
        """Return the names in `columns` of columns with a value in some row, from the file's statistics.

        An empty list does not count as a value.
        """
        about, stored = self._footer(dataset)
        leaves = self._leaves(dataset)
        groups = [about.row_group(at) for at in range(about.num_row_groups)]
        return [
            name
            for name in columns
            if name in stored.names and any(_holds_value(group.column(leaves.index(name))) for group in groups)
        ]

    def beginnings(self, dataset: str, columns: Sequence[str], groups: Sequence[int], rows: int) -> pa.Table:
        """Return the first `rows` rows of some row groups; the other rows of the groups are not decoded."""
        about, _ = self._footer(dataset)
        try:
            file = pq.ParquetFile(self._file(dataset), metadata=about, pre_buffer=False)
            heads = [next(file.iter_batches(rows, [at], columns, use_threads=False)) for at in groups]
        except (pa.ArrowException, OSError) as error:
            raise UserError("recording", str(self._file(dataset)), f"is damaged: {arrow_reason(error)}") from None
        return pa.Table.from_batches(heads)

    def workload(self) -> Workload:
        """Return the offered workload. Raises UserError if the recording does not have it."""
        if not (self.path / WORKLOAD).is_file():
            remedy = f"does not hold its trace, {WORKLOAD}; give the trace it was made from"
            raise UserError("recording", str(self.path), remedy)
        return ParquetReader().read(self.path / WORKLOAD)

    def workload_uses(self, *columns: str) -> bool:
        """Return whether the offered workload has one of these columns, which it has only if a request uses it."""
        path = self.path / WORKLOAD
        return path.is_file() and not set(columns).isdisjoint(pq.read_schema(path).names)

    def _file(self, dataset: str) -> Path:
        return self.path / f"{dataset}.parquet"

    def _footer(self, dataset: str) -> _Footer:
        """Return the metadata of a dataset's file, which is read once."""
        if dataset not in self._footers:
            self._footers[dataset] = self._checked(dataset)
        return self._footers[dataset]

    def _checked(self, dataset: str) -> _Footer:
        path = self._file(dataset)
        if not path.is_file():
            raise UserError("recording", str(self.path), f"is damaged: {path.name} is missing; record the run again")
        try:
            about = pq.read_metadata(path)
            schema = about.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise UserError("recording", str(path), f"cannot be read: {arrow_reason(error)}") from None
        if (schema.metadata or {}).get(b"tokentwin.dataset") != dataset.encode():
            raise UserError("recording", str(path), f"is not the dataset {dataset!r} of a tokentwin recording")
        ours = arrow_schema(dataset)
        # Columns are only ever added at the end, so the schema of one version begins with the schema of the other.
        for field, stored in zip(ours, schema, strict=False):
            if (field.name, field.type) != (stored.name, stored.type):
                remedy = f"must be {field.name}: {field.type}; record the run again"
                raise UserError(f"{path}: {stored.name}", str(stored.type), remedy)
        return _Footer(about, schema)


def _with_all(table: pa.Table, wanted: Sequence[str], dataset: str, rows: int) -> pa.Table:
    """Return the `wanted` columns of `table`; a column that an older recording lacks is null."""
    for name in wanted:
        if name not in table.column_names:
            field = arrow_schema(dataset).field(name)
            table = table.append_column(field, pa.nulls(rows, field.type))
    return table.select(wanted)


def _holds_value(chunk: pq.ColumnChunkMetaData) -> bool:
    nulls = chunk.statistics.null_count if chunk.statistics else None
    return nulls is None or nulls < chunk.num_values or chunk.statistics.has_min_max


class _Experts(BaseModel):
    experts: int = Field(ge=1)
    topk: int = Field(ge=1)


class _Served(BaseModel):
    speed: float = 1.0


class _Notes(BaseModel):
    """The notes that we read; `tokentwin.traces.recording` documents them."""

    gpu: str | None = None
    trust: dict[str, Any] | None = None
    bands: dict[str, dict[str, tuple[float, float]]] | None = None
    capacity: dict[str, float] | None = None
    front_door: FrontDoor | None = None
    experts: _Experts | None = None
    served: _Served | None = None
    launching_share: float | None = None
    canary_before_ns: int = 0
    canary_after_ns: int = 0


class _Hardware(BaseModel):
    gpu: str | None = None


class _Deployment(BaseModel):
    """The fields that we read of any engine's deployment; deployments of our engine are read as `Deployment`."""

    model: str | None = None
    scheduler: dict[str, Any] | None = None


_OBJECTS: dict[str, type[BaseModel]] = {"deployment": _Deployment, "hardware": _Hardware, "notes": _Notes}


def check_objects(run: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a column of the row `run` that is neither empty nor a valid JSON object."""
    for name, model in _OBJECTS.items():
        text, field = run[name], f"{where}: {name}"
        if not text:
            continue
        try:
            value = parse_json(text)
            if not isinstance(value, dict):
                raise ValueError("must be a JSON object")
        except ValueError as error:
            raise UserError(field, text, f"{error}; record the run again") from None
        parse(model, with_present_names(value), field)


def notes_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of a row of `runs`; empty if it has none or they are not a JSON object."""
    try:
        notes = json.loads(run.get("notes") or "{}")
    except ValueError:
        return {}
    return with_present_names(notes) if isinstance(notes, dict) else {}
