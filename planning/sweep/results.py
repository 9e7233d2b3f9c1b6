"""The results of a sweep, read from its dataset: its rows, its varied columns, and the units of its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.calibration.steps.external_calibration import LEARNT_FILES
from tokentwin.planning.deployments import found_at
from tokentwin.planning.sweep.dataset import ABOUT, FORMAT, journal_rows
from tokentwin.serving.answers.document import Answer
from tokentwin.serving.answers.figures import counted
from tokentwin.serving.answers.report import NUMBER, Column, Line, Table
from tokentwin.serving.data_file import parse_json, present_name
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS, STATISTICS

_BLOCKS, _OLD_BLOCKS = "deployment.scheduler.num_blocks", 4096
_TYPES = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}


@dataclass(frozen=True)
class SweepResults(Answer):
    """The results of a sweep.

    Attributes:
        runs: table with one row for each run, including failed runs
        parameters: columns that were varied, in the order of the sweep
        paths: dotted path of the setting of each parameter
        metrics: axis title of each metric column that has a value in some run
        base: the settings that the sweep varies
        format: format of the dataset
    """

    runs: pa.Table
    parameters: tuple[str, ...]
    paths: Mapping[str, str]
    metrics: Mapping[str, str]
    base: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def load(cls, directory: Path) -> SweepResults:
        """Load the dataset of a sweep in `directory`; of a sweep under way the runs that have ended.

        Raises UserError if it is damaged.
        """
        about = _about(directory / ABOUT)
        try:
            paths = {str(name): str(path) for path, name in about["varied"].items()}
            keys = [pa.field(name, _TYPES[about["columns"][name]]) for name in about["partition"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError("sweep", f"{directory.name}/{ABOUT}", f"is damaged: no {error}") from None
        table = _rows(directory, pa.schema(keys), about["columns"])
        missing = {*paths, "run_id", "status", "config"} - set(table.column_names)
        if missing:
            raise UserError("sweep", directory.name, f"is damaged: its runs have no column {min(missing)}")
        order = [name for name in table.column_names if name in paths]
        metrics = {
            column.name: title
            for column in table.schema
            if (title := axis_title(column.name))
            if pa.types.is_floating(column.type) | pa.types.is_integer(column.type)
            if table[column.name].null_count < table.num_rows
        }
        base = about.get("base")
        return cls(table, tuple(order), paths, metrics, base if isinstance(base, dict) else {}, about.get("format", 0))

    @property
    def tables(self) -> tuple[str, ...]:
        return ("runs",)

    def table(self, name: str) -> pa.Table:
        """Return `runs`, the table with one row for each run."""
        return self.runs

    def report(self) -> Iterator[Line | Table]:
        """Yield the number of runs, and the range of each metric."""
        yield Line(self.summary)
        if self.old_sizing:
            yield Line(self.old_sizing)
        done = self.complete
        ranges = {name: pc.min_max(done[name]).as_py() for name in self.metrics}
        rows = [(title, ranges[name]["min"], ranges[name]["max"]) for name, title in self.metrics.items()]
        yield Table((Column("metric"), Column("lowest", NUMBER), Column("highest", NUMBER)), rows)

    @property
    def summary(self) -> str:
        """The number of runs, of failed runs, and of values of each parameter, in words."""
        failed = self.runs.num_rows - self.complete.num_rows
        varied = ", ".join(f"{name} ({len(self.values(name))})" for name in self.parameters) or "nothing"
        runs = counted(self.runs.num_rows, "run") + (f", {failed:,} of them failed" if failed else "")
        return f"{runs}; varied: {varied}"

    @property
    def old_sizing(self) -> str:
        """A sentence if KV blocks of some runs do not follow from the memory of their GPU; empty if all do.

        Before format 3, they did not where neither blocks nor a share of memory were stated.
        """
        if self.format >= FORMAT or found_at(self.base, _BLOCKS) is not None:
            return ""
        columns = [name for name, path in self.paths.items() if path == _BLOCKS]
        rows = self.complete.select(["config", *columns]).to_pylist()
        unstated = [row["config"] for row in rows if not any(row[name] for name in columns)]
        old = sum(_sized_by_default(parse_json(config)) for config in unstated)
        number = "All" if old == len(rows) else f"{old:,} of {len(rows):,}"
        sentence = f"{number} runs have the old sizing, {_OLD_BLOCKS - 1:,} KV blocks on every GPU; make them again"
        return sentence if old else ""

    @property
    def complete(self) -> pa.Table:
        return self.runs.filter(pc.equal(self.runs["status"], "complete"))

    def values(self, parameter: str) -> list[Any]:
        """Return the values of a parameter, sorted, with null last."""
        values = self.runs[parameter].unique()
        return values.take(pc.array_sort_indices(values)).to_pylist()


def _sized_by_default(config: dict[str, Any]) -> bool:
    """Return whether a run on a GPU has the default number of KV blocks of our own engine."""
    learnt = any(Path(config["calibration"] or "", name).exists() for name in LEARNT_FILES)
    memory = found_at(config, "deployment.gpu_memory_utilization")
    return bool(config["gpu"] or learnt) and memory is None and found_at(config, _BLOCKS) == _OLD_BLOCKS


def axis_title(column: str) -> str:
    """Return the title of a metric's axis, with its unit; empty for a column that is not a metric."""
    if column in METRICS:
        return METRICS[column].axis
    name, _, statistic = column.rpartition("_")
    if name not in METRICS or statistic not in (*STATISTICS, "peak"):
        return ""
    known = METRICS[name]
    return f"{known.label} {statistic}" + (f" ({known.unit})" if known.unit and statistic != "count" else "")


def _about(path: Path) -> dict[str, Any]:
    name = f"{path.parent.name}/{path.name}"
    try:
        about = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError("sweep", name, f"cannot be read: {error}") from None
    if not isinstance(about, dict):
        raise UserError("sweep", name, "does not describe a sweep")
    return about


def _rows(directory: Path, keys: pa.Schema, columns: Mapping[str, str]) -> pa.Table:
    """Return the rows of the partitions, and those that a sweep under way has in its journal."""
    rows, has_merged = list(journal_rows(directory)), (directory / "runs").is_dir()
    if has_merged and not rows:
        return _merged(directory, keys)
    new = pa.Table.from_pylist(rows, schema=pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()]))
    if not has_merged:
        return new
    merged = _merged(directory, keys)
    merged = merged.filter(pc.invert(pc.is_in(merged["run_id"], new["run_id"])))
    return pa.concat_tables([merged, new.select(merged.column_names)], promote_options="default")


def _merged(directory: Path, keys: pa.Schema) -> pa.Table:
    import pyarrow.dataset as ds  # imports slowly

    try:
        rows = ds.dataset(directory / "runs", format="parquet", partitioning=ds.partitioning(keys, flavor="hive"))
        table = rows.to_table()
    except (OSError, pa.ArrowException) as error:
        raise UserError("sweep", directory.name, f"its runs cannot be read: {error}") from None
    table = table.rename_columns([present_name(name) for name in table.column_names])
    first = [*keys.names, *(name for name in table.column_names if name not in keys.names)]
    return table.select(first)
