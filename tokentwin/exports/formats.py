"""The formats that a recording can be exported to, and the one way to write them: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from serving.errors import UserError

if TYPE_CHECKING:
    from traces.recording import Recording

TABLES = ("requests", "steps")


@dataclass(frozen=True)
class Format:
    """What a format is for, its files' suffix and media type, and `module:function` that writes it.

    The function takes a recording and a binary file; with `of_table`, also which of `TABLES`.
    """

    what: str
    suffix: str
    mime: str
    writer: str
    of_table: bool = False

    @property
    def write(self) -> Callable[..., None]:
        """The function. Raises UserError when a package that it needs is not installed."""
        module, _, function = self.writer.partition(":")
        try:
            found: Callable[..., None] = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            remedy = "is needed for this format and not installed; pip install 'tokentwin[dashboard]'"
            raise UserError("export", str(error.name), remedy) from None
        return found


FORMATS = {
    "parquet": Format(
        "requests or steps, with metrics", ".parquet", "application/vnd.apache.parquet",
        "tokentwin.exports.tables:write_parquet", of_table=True,
    ),
    "csv": Format(
        "the same for spreadsheets", ".csv", "text/csv", "tokentwin.exports.tables:write_csv", of_table=True
    ),
    "html": Format("a report in one file, with its figures", ".html", "text/html", "dashboard.html_report:write_html"),
    "perfetto": Format(
        "a trace for ui.perfetto.dev", ".trace.json", "application/json", "tokentwin.exports.perfetto:write_perfetto"
    ),
    "openmetrics": Format(
        "what vLLM's /metrics would say at the end", ".om.txt", "application/openmetrics-text",
        "tokentwin.exports.openmetrics:write_openmetrics",
    ),
}  # fmt: skip


def write_export(recording: Recording, name: str, out: IO[bytes], table: str | None = None) -> None:
    """Write `recording` to an open file in the format `name`; `table` is one of `TABLES`, by default the first.

    Raises UserError for an unknown format or table, a table given to a format that holds the whole run, and a
    recording that is damaged or lacks what the format needs.
    """
    if name not in FORMATS:
        raise UserError("format", name, f"is none of {', '.join(FORMATS)}")
    format = FORMATS[name]
    if table is not None and not format.of_table:
        raise UserError("table", table, f"cannot be chosen: {name} holds the whole run")
    if table is not None and table not in TABLES:
        raise UserError("table", table, f"is none of {', '.join(TABLES)}")
    if format.of_table:
        format.write(recording, out, table or TABLES[0])
    else:
        format.write(recording, out)


def export(recording: Recording, name: str, path: Path, table: str | None = None, overwrite: bool = False) -> None:
    """`write_export` to the file `path`, in full or not at all.

    Raises UserError also if the file exists and `overwrite` is not set, or if it cannot be written.
    """
    if path.exists() and not (overwrite and path.is_file()):
        raise UserError("output", str(path), "exists; use --force to overwrite a file, or choose another name")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            write_export(recording, name, out, table)
        partial.replace(path)
    except OSError as error:
        raise UserError("output", str(path), f"cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # where nothing could be written there is nothing to remove
            partial.unlink(missing_ok=True)
