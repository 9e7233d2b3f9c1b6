"""The column dictionary: name, type, unit and definition of every column, taken from the Parquet schemas.

It is written as `columns.json` beside each dataset, for tools that do not read the metadata of Arrow fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from serving.errors import UserError
from traces.formats.parquet import SCHEMA, arrow_reason
from traces.schema import DATASETS, arrow_schema

FILE = "columns.json"
_NAMES_INSIDE = re.compile(r" \('\w+'\)")  # Parquet gives these names to the fields of a map


def described(schema: pa.Schema) -> list[dict[str, str]]:
    """Return one entry a column: `name`, `type` (Arrow's), `unit` (empty for a count or a label) and `definition`."""
    return [
        {
            "name": field.name,
            "type": _NAMES_INSIDE.sub("", str(field.type).replace("<element: ", "<item: ")),
            "unit": _said(field, b"unit"),
            "definition": _said(field, b"definition"),
        }
        for field in schema
    ]


def recording_columns() -> dict[str, list[dict[str, str]]]:
    """Return the columns of every dataset of a recording, by dataset."""
    return {"workload": described(SCHEMA), **{name: described(arrow_schema(name)) for name in DATASETS}}


def columns_text(datasets: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the text of `columns.json`: JSON, one line a column."""
    blocks = (
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(column, ensure_ascii=False)}" for column in columns) + "\n  ]"
        for name, columns in datasets.items()
    )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def columns_at(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the columns of one Parquet file, or of the datasets in the directory `path`.

    Raises UserError if `path` holds no Parquet file, or if a file is damaged.
    """
    if path.is_dir():
        beside = path / FILE
        if beside.is_file():
            try:
                columns: dict[str, list[dict[str, str]]] = json.loads(beside.read_text(encoding="utf-8"))
            except ValueError:
                raise UserError("columns", str(beside), "is damaged; remove it to read the Parquet files") from None
            return columns
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UserError("columns", str(path), "holds no Parquet file; give a Parquet file, a recording or a sweep")
    else:
        files = [path]
    return {file.stem: described(_schema(file)) for file in files}


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except FileNotFoundError:
        raise UserError("columns", str(file), "does not exist") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError("columns", str(file), f"is not a Parquet file: {arrow_reason(error)}") from None


def _said(field: pa.Field, key: bytes) -> str:
    return (field.metadata or {}).get(key, b"").decode()
