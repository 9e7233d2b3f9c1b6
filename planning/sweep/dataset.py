"""A sweep on disk: a journal of finished runs, and the hive-partitioned Parquet dataset into which it is merged.

A run is saved once its journal entry has been renamed into place, so an entry is complete or absent even if the sweep
is killed. Folding merges the entries into the partitions by run id, replaces the partitions by rename, and only then
deletes the entries. If it is killed before the end, it can be repeated. Rows are sorted, so the bytes of the dataset
depend only on its runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokentwin.serving.data_file import read_json_file
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.whole_file import DirectoryLock, whole_file
from tokentwin.traces.schema import COLUMNS_FILE, columns_text, described

ABOUT = "sweep.json"  # file with the data that all rows share
FORMAT = 3  # up to 2, an engine whose KV blocks and share of memory nobody stated had 4,095 blocks on every GPU
_FILE = "runs.parquet"
_JOURNAL = ".journal"


class SweepDataset:
    """The dataset in the directory `path`, to which only one sweep at a time can write.

    `about` holds the data that all rows share. Raises UserError for a dataset made with another `about`; only `inputs`,
    the digests of input files, may get more entries. Also raises UserError if `resume` is not set and there is a
    dataset.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], schema: pa.Schema, partition: Sequence[str], *, resume: bool
    ) -> None:
        self.path = path
        self._schema = schema
        self._partition = list(partition)
        self._journal = path / _JOURNAL
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(path, "out")
        except OSError as error:
            raise UserError("out", str(path), f"cannot be made: {error.strerror}") from None
        try:
            self._claim(about, resume)
        except UserError:
            self.close()
            raise

    def _claim(self, about: Mapping[str, Any], resume: bool) -> None:
        file = self.path / ABOUT
        self._begun = not file.exists()
        if not self._begun:
            if not resume:
                remedy = "holds a sweep; use --resume to continue it, or choose another directory"
                raise UserError("out", str(self.path), remedy)
            about = _agreed(file, about)
        elif any(not child.name.startswith(".") for child in self.path.iterdir()):
            raise UserError("out", str(self.path), "holds other files; choose another directory")
        for left in self.path.rglob(".*.partial"):
            left.unlink()
        _write(file, (json.dumps(about, indent=2, sort_keys=True) + "\n").encode())
        _write(self.path / COLUMNS_FILE, columns_text({"runs": described(self._schema)}).encode())

    def discard(self) -> None:
        """Remove the dataset, if this object created it."""
        if self._begun:
            for name in ("runs", "requests", self._journal.name):
                rmtree(self.path / name, ignore_errors=True)
            for name in (ABOUT, COLUMNS_FILE):
                (self.path / name).unlink()

    def close(self) -> None:
        """Release the directory for other sweeps."""
        self._lock.close()
        with suppress(OSError):  # the directory is empty only after a sweep without any result
            self.path.rmdir()

    def errors(self) -> dict[str, str | None]:
        """Return the error of every saved run by its id; None for a run that did not fail."""
        errors: dict[str, str | None] = {}
        for file in sorted((self.path / "runs").rglob(_FILE)):
            table = _read(file, ["run_id", "error"])
            errors |= zip(table["run_id"].to_pylist(), table["error"].to_pylist(), strict=True)
        return errors | {row["run_id"]: row.get("error") for row in journal_rows(self.path)}

    def add(self, row: Mapping[str, Any], requests: bytes | None = None) -> None:
        """Add a finished run: its values by column, and its requests as a Parquet file."""
        if requests is not None:
            _write(self.path / "requests" / f"run_id={row['run_id']}" / "requests.parquet", requests)
        _write(self._journal / f"{row['run_id']}.json", json.dumps(row, allow_nan=False).encode())

    def fold(self) -> None:
        """Merge the journal into the partitions; newer rows replace older rows of the same run."""
        by_folder: dict[Path, list[dict[str, Any]]] = {}
        for row in journal_rows(self.path):
            by_folder.setdefault(self._folder(row), []).append(row)
        for folder, rows in by_folder.items():
            self._merge(folder / _FILE, rows)
            for row in rows:
                (self._journal / f"{row['run_id']}.json").unlink()

    def _merge(self, file: Path, rows: list[dict[str, Any]]) -> None:
        stored = pa.schema([field for field in self._schema if field.name not in self._partition])
        table = pa.Table.from_pylist(rows, schema=stored)
        if file.exists():
            old = _read(file)
            table = pa.concat_tables([old.filter(pc.invert(pc.is_in(old["run_id"], table["run_id"]))), table])
        parameters = [field.name for field in stored if b"path" in field.metadata]
        table = table.sort_by([(name, "ascending") for name in (*parameters, "run_id")])
        sink = pa.BufferOutputStream()
        pq.write_table(table.cast(stored), sink, compression="zstd")
        _write(file, sink.getvalue())

    def _folder(self, row: Mapping[str, Any]) -> Path:
        keys = [f"{name}={_hive(row[name])}" for name in self._partition]
        return Path(self.path, "runs", *keys)


def journal_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the finished runs of the dataset `path` that are not in its partitions yet."""
    for file in sorted((path / _JOURNAL).glob("*.json")):
        with suppress(FileNotFoundError):  # merged in the meantime
            yield json.loads(file.read_bytes())


def _agreed(file: Path, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of `file` and `about` merged. Raises UserError if they contradict each other."""
    before = read_json_file(file, "out")
    was, now = before.pop("inputs", {}), about["inputs"]
    changed = [path for path in now if was.get(path, now[path]) != now[path]]
    if changed:
        raise UserError("input", changed[0], "has changed since the sweep began; give another --out")
    difference = _difference("", before, {name: value for name, value in about.items() if name != "inputs"})
    if difference:
        path, old, new = difference
        remedy = f"was {old} in {file.parent}; a sweep can only get more values and seeds, so give another --out"
        raise UserError(path, new, remedy)
    return {**about, "inputs": {**was, **now}}


def _difference(path: str, was: Any, now: Any) -> tuple[str, Any, Any] | None:
    """Return the first path at which two values differ, and both values there."""
    if isinstance(was, dict) and isinstance(now, dict):
        pairs = ((f"{path}.{name}".strip("."), was.get(name), now.get(name)) for name in {**now, **was})
        return next(filter(None, (_difference(*pair) for pair in pairs)), None)
    return None if was == now else (path, was, now)


def _hive(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe=" ")


def _read(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return one file of the dataset, without the columns in its path."""
    try:
        return pq.ParquetFile(file).read(columns)
    except (pa.ArrowException, OSError) as error:
        raise UserError("out", str(file), f"is damaged: {error}") from None


def _write(file: Path, content: bytes) -> None:
    """Write `content` to `file`, in full or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise UserError("out", str(file), f"cannot be written: {reason(error)}") from None
