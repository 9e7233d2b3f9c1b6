"""Tables as files. CSV has neither types nor lists: a list becomes its values with spaces in between, a map JSON.

In CSV, text that a spreadsheet would run as a formula, such as a tenant's name that begins with `=`, gets an apostrophe
before it (OWASP, CSV Injection).
"""

from __future__ import annotations

import json
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

_FORMULA = r"^([=+\-@\t\r])"


def write_table(table: pa.Table, name: str, out: IO[bytes]) -> None:
    """Write `parquet`, with the metadata of its fields, or `csv`, with a header; in CSV, null is an empty field."""
    if name == "parquet":
        pq.write_table(table, out, compression="zstd")
        return
    for index, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            flat = [_text(value) for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(flat, pa.string()))
        elif pa.types.is_string(field.type) or pa.types.is_dictionary(field.type):
            words = pc.cast(table.column(index), pa.string())
            inert = pc.replace_substring_regex(words, _FORMULA, r"'\1")
            table = table.set_column(index, field.name, inert)
    csv.write_csv(table, out)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if value and isinstance(value[0], tuple):
        return json.dumps(dict(value))
    return " ".join(map(str, value))
