"""Functions that read a trace of any format, and write a workload in any format.

The format of a file is recognised by its content and never by its name. A format for reading is a small class with the
three members of `TraceReader`, listed in `READERS`. All readers guarantee requests sorted by `(arrival_ns, id)`, unique
ids, times of 0 or more, and lengths of 1 or more. A format for writing is a function listed in `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tokentwin.serving.errors import UserError
from tokentwin.serving.whole_file import write_whole
from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.azure import AzureReader
from tokentwin.traces.formats.measured_trace import AIPERF, AIPERF_EXPORT, BENCH_SERVE, GUIDELLM, MeasuredTraceReader
from tokentwin.traces.formats.mooncake import MooncakeReader, write_mooncake
from tokentwin.traces.formats.parquet import ParquetReader, write_parquet
from tokentwin.traces.formats.rows import read_head
from tokentwin.traces.formats.session_trace import SESSION_TRACES, SessionTraceReader
from tokentwin.traces.formats.simple import SimpleCsvReader, SimpleJsonReader, read_with_columns

if TYPE_CHECKING:
    from tokentwin.traces.formats.sessions import Assumed

WRITERS: dict[str, Callable[[Workload, Path], None]] = {"parquet": write_parquet, "mooncake": write_mooncake}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "mooncake"}


class TraceReader(Protocol):
    """A trace format for reading. `matches` gets the first 64 KiB of the (unpacked) content."""

    name: str

    def matches(self, head: bytes) -> bool:
        """Return True if a file that begins with `head` is in the format."""

    def read(self, path: Path) -> Workload:
        """Return the workload in the file. Raises UserError with file, line and field if it is invalid."""


# The formats are tried in this order. The simple formats come last because they match any text of their kind. An error
# can then name a misspelt field.
READERS: tuple[TraceReader, ...] = (
    ParquetReader(),
    AzureReader(),
    *SESSION_TRACES,
    MooncakeReader(),
    BENCH_SERVE,
    GUIDELLM,
    AIPERF,
    SimpleJsonReader(),
    SimpleCsvReader(),
)


def read_workload(
    path: str | Path, assumed: Assumed | None = None, columns: Mapping[str, str] | None = None
) -> Workload:
    """Read the workload in a trace file of any known format, or the workload of a recording.

    `report.json#2` is the run with index 2 of a report with several runs. `assumed` is what a file of conversations
    does not state. `columns` has the column of each field of CSV or JSON lines with other names. Raises a one-line
    UserError if the file cannot be read, has no known format, or is not valid in its format, and if something is
    assumed about a format that states it.
    """
    path, run = _numbered_run(Path(path))
    if path.is_dir():
        inside = [path / name for name in ("workload.parquet", AIPERF_EXPORT) if (path / name).is_file()]
        if not inside:
            remedy = "is a directory without workload.parquet; give a trace file or a recording that has one"
            raise UserError("trace", str(path), remedy)
        path = inside[0]
    head = read_head(path)
    if not head.strip():
        raise UserError("trace", str(path), "is empty")
    if columns:
        return read_with_columns(path, head, columns)
    for reader in READERS:
        if reader.matches(head):
            if isinstance(reader, SessionTraceReader) and run is None:
                return reader.read(path, assumed)
            if assumed is not None:
                given = ", ".join(sorted(assumed.model_fields_set))
                raise UserError(
                    "trace", str(path), f"has the format {reader.name}, which needs no {given}; leave it out"
                )
            if run is None:
                return reader.read(path)
            if isinstance(reader, MeasuredTraceReader):
                return reader.read(path, run)
            raise UserError("trace", f"{path}#{run}", f"is no report of several runs; give {path}")
    formats = ", ".join(reader.name for reader in READERS)
    raise UserError("trace", str(path), f"has no known format ({formats}); see docs/traces.md")


def _numbered_run(path: Path) -> tuple[Path, int | None]:
    """Split a path such as `report.json#2` into the file and the index of the run."""
    file, mark, number = str(path).rpartition("#")
    if path.exists() or not mark or not number.isascii() or not number.isdigit():
        return path, None
    return Path(file), int(number)


def write_workload(workload: Workload, path: str | Path, format: str | None = None, overwrite: bool = False) -> None:
    """Write `workload` to the file `path`; a failed write leaves no partial file.

    `format` is a key of `WRITERS`. By default the format follows from the file's suffix, `.parquet` or `.jsonl`
    (Mooncake). Raises UserError if the file exists and `overwrite` is False, or if it cannot be written.
    """
    path = Path(path)
    name = format or _SUFFIXES.get(path.suffix)
    if name not in WRITERS:
        formats, suffixes = " or ".join(WRITERS), " or ".join(_SUFFIXES)
        remedy = f"does not say the format; give --to {formats}, or a name that ends in {suffixes}"
        raise UserError("format", format or path.name, remedy)
    write_whole(path, partial(WRITERS[name], workload), overwrite)
