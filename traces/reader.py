"""One way into any trace: the format is found by what the file holds, never by what it is called.

A format is a small class with the three members of `TraceReader`, listed in `READERS`. The readers keep a
promise to everything downstream: requests sorted by `(arrival_ns, id)`, unique ids, times of 0 or more,
lengths of 1 or more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from serving.errors import UserError
from serving.workload import Workload
from traces.azure import AzureReader
from traces.measured_trace import AIPERF, AIPERF_EXPORT, BENCH_SERVE, GUIDELLM, MeasuredTraceReader
from traces.mooncake import MooncakeReader
from traces.parquet import ParquetReader
from traces.rows import read_head
from traces.simple import SimpleCsvReader, SimpleJsonReader


class TraceReader(Protocol):
    """A trace format. `matches` sees the first 64 KiB, unpacked if the file is gzipped."""

    name: str

    def matches(self, head: bytes) -> bool:
        """Whether a file that begins like this is in the format."""

    def read(self, path: Path) -> Workload:
        """The workload in the file. Raises UserError that names file, line and field."""


# In the order in which they are tried. The simple formats come last: they take anything that looks like their kind of
# text, so that a misspelt field is named, rather than the whole file refused.
READERS: tuple[TraceReader, ...] = (
    ParquetReader(),
    AzureReader(),
    MooncakeReader(),
    BENCH_SERVE,
    GUIDELLM,
    AIPERF,
    SimpleJsonReader(),
    SimpleCsvReader(),
)


def read_workload(path: str | Path) -> Workload:
    """Read the workload in a trace file of any known format, or the one that a recording was made from.

    `report.json#2` is run 2 of a report that holds several. Raises UserError, one line, when the file cannot be read,
    is of no known format, or breaks its rules.
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
    for reader in READERS:
        if reader.matches(head):
            if run is None:
                return reader.read(path)
            if isinstance(reader, MeasuredTraceReader):
                return reader.read(path, run)
            raise UserError("trace", f"{path}#{run}", f"is no report of several runs; give {path}")
    formats = ", ".join(reader.name for reader in READERS)
    raise UserError("trace", str(path), f"has no known format ({formats}); see docs/traces.md")


def _numbered_run(path: Path) -> tuple[Path, int | None]:
    """The file and the run that `report.json#2` names."""
    file, mark, number = str(path).rpartition("#")
    if path.exists() or not mark or not number.isascii() or not number.isdigit():
        return path, None
    return Path(file), int(number)
