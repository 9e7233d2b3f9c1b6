"""Tables as files. CSV has neither types nor lists: a list becomes its values with spaces in between, a map JSON."""

from __future__ import annotations

import json
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from serving.metrics import metric


def write_table(table: pa.Table, name: str, out: IO[bytes]) -> None:
    """Any table in the tabular format `name`."""
    {"parquet": as_parquet, "csv": as_csv}[name](table, out)


def as_parquet(table: pa.Table, out: IO[bytes]) -> None:
    """Any table as a Parquet file, with the metadata of its fields."""
    pq.write_table(table, out, compression="zstd")


def as_csv(table: pa.Table, out: IO[bytes]) -> None:
    """Any table as CSV, with a header; null is an empty field."""
    for index, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            flat = [_text(value) for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(flat, pa.string()))
    csv.write_csv(table, out)


def number_field(name: str, unit: str, definition: str, whole: bool = False) -> pa.Field:
    """A column of numbers, int64 if they are `whole`."""
    return pa.field(name, pa.int64() if whole else pa.float64(), metadata={"unit": unit, "definition": definition})


def metric_field(name: str) -> pa.Field:
    """A column of a metric of the glossary."""
    known = metric(name)
    return number_field(name, known.unit, known.definition)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if value and isinstance(value[0], tuple):
        return json.dumps(dict(value))
    return " ".join(map(str, value))
