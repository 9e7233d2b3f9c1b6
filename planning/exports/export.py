"""The functions that export a run or an answer to a file or to a browser.

CSV has neither types nor lists. A list is written as its values with spaces between them, and a map as JSON. Text that
a spreadsheet would run as a formula, such as a tenant's name that begins with `=`, gets an apostrophe before it (OWASP,
CSV Injection).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from tokentwin.planning.exports.exportable import Exportable
from tokentwin.planning.exports.formats import FORMATS
from tokentwin.planning.exports.openmetrics import write_openmetrics
from tokentwin.planning.exports.perfetto import write_perfetto
from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.serving.answers.document import Document
from tokentwin.serving.errors import UserError
from tokentwin.serving.whole_file import write_whole

_FORMULA = r"^([=+\-@\t\r])"


def write_table(table: pa.Table, name: str, out: IO[bytes]) -> None:
    """Write `table` in the format `name`: `parquet` with field metadata, or `csv` with a header and null as no text."""
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


Write = Callable[[Any, IO[bytes]], None]  # the source is written as a whole


def _write_json(document: Document, out: IO[bytes]) -> None:
    out.write(document.dumps(indent=1).encode() + b"\n")


_OF_KIND: dict[type, dict[str, Write]] = {
    Document: {"json": _write_json},
    RecordedRun: {"perfetto": write_perfetto, "openmetrics": write_openmetrics},
}


def formats_of(source: Exportable) -> list[str]:
    """Return the names of the formats of `source`: a report, tables if there are any, and the formats of its kind."""
    own = {"html", *_writers(source)}
    return [name for name, format in FORMATS.items() if name in own or (format.tabular and source.tables)]


def write_export(
    source: Exportable, name: str, out: IO[bytes], table: str | None = None, html: Write | None = None
) -> None:
    """Write `source` to an open file in the format `name`; `table` is one of its tables, by default the first.

    `html` is the function that writes reports. Raises UserError for a format or a table that the source does not have,
    for a table together with a format that holds all tables, and for a source that is damaged or lacks data that the
    format needs.
    """
    if name not in formats_of(source):
        raise UserError("format", name, f"cannot be written for {source.what}; choose {_or(formats_of(source))}")
    if not FORMATS[name].tabular:
        if table is not None:
            remedy = f"cannot be chosen, because {name} contains all tables of {source.what}; leave --table out"
            raise UserError("table", table, remedy)
        write = html if name == "html" else _writers(source)[name]
        if write is None:
            raise ValueError("nobody said what writes reports")
        write(source, out)
        return
    if table is not None and table not in source.tables:
        raise UserError("table", table, f"does not exist in {source.what}; choose {_or(source.tables)}")
    write_table(source.table(table or source.tables[0]), name, out)


def export(
    source: Exportable,
    name: str,
    path: Path,
    table: str | None = None,
    overwrite: bool = False,
    html: Write | None = None,
) -> None:
    """Write `source` to the file `path`, in full or not at all.

    Raises UserError as `write_export` does, if the file exists and `overwrite` is not set, and if it cannot be written.
    """

    def write(partial: Path) -> None:
        with partial.open("wb") as out:
            write_export(source, name, out, table, html=html)

    write_whole(path, write, overwrite)


def _writers(source: Exportable) -> dict[str, Write]:
    return {name: write for kind, own in _OF_KIND.items() if isinstance(source, kind) for name, write in own.items()}


def _or(names: list[str] | tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
