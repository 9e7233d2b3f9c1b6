"""The one way in which things are exported, to a file or to a browser."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from serving.errors import UserError
from tokentwin.exports.exportable import Exportable, named
from tokentwin.exports.file import write_whole
from tokentwin.exports.formats import FORMATS
from tokentwin.exports.tables import write_table


def formats_of(source: Exportable) -> list[str]:
    """The names of the formats that it has."""
    return [name for name, format in FORMATS.items() if name in source.writers or (format.tabular and source.tables)]


def write_export(source: Exportable, name: str, out: IO[bytes], table: str | None = None) -> None:
    """Write `source` to an open file in the format `name`; `table` is one of its tables, by default the first.

    Raises UserError for a format or a table that it has not, a table given to a format that holds everything, and a
    source that is damaged or lacks what the format needs.
    """
    if name not in formats_of(source):
        raise UserError("format", name, f"is none that {source.what} has; choose {_or(formats_of(source))}")
    if not FORMATS[name].tabular:
        if table is not None:
            raise UserError("table", table, f"cannot be chosen: {name} holds the whole of {source.what}")
        named(source.writers[name])(source, out)
        return
    if table is not None and table not in source.tables:
        raise UserError("table", table, f"is none that this has; choose {_or(source.tables)}")
    write_table(source.table(table or source.tables[0]), name, out)


def export(source: Exportable, name: str, path: Path, table: str | None = None, overwrite: bool = False) -> None:
    """`write_export` to the file `path`, in full or not at all.

    Raises UserError also if the file exists and `overwrite` is not set, or if it cannot be written.
    """
    write_whole(path, lambda out: write_export(source, name, out, table), overwrite)


def _or(names: list[str] | tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
