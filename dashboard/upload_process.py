"""The process in which an uploaded trace is read, because a few kilobytes from a stranger can unpack into terabytes.

The size that the file states is checked before anything is read. It may be false, and the readers of `traces` have no
limits. So the process is limited in memory and time, and a reader that dies does not end a page.
"""

from __future__ import annotations

import gzip
import json
import resource
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import MAGIC
from tokentwin.traces.formats.trace_file import read_workload, write_workload

MB = 1_000_000
FAILED = 1
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Limits:
    """The limits of an upload, and of the process that reads it.

    `segments` counts the segments of all prompts, `names_mb` the characters of all names; `memory_mb` limits what the
    process allocates, and `seconds` its CPU time.
    """

    unpacked_mb: int = 500
    requests: int = 500_000
    segments: int = 5_000_000
    names_mb: int = 100
    memory_mb: int = 3000
    seconds: int = 300


def main(upload: Path, out: Path, limits: Limits, columns: Mapping[str, str]) -> int:
    """Write the requests of the trace `upload` to `out`; else print a UserError as JSON, and return `FAILED`.

    `columns` has the column of each field, if the user states them.
    """
    _confine(limits)
    try:
        _check_size(upload, limits)
        write_workload(_bounded(read_workload(upload, None, columns), limits), out)
    except UserError as error:
        print(json.dumps([error.field, error.value, error.remedy], default=str))
        return FAILED
    except MemoryError:
        print(json.dumps(["trace", "the upload", "needs too much memory to read; upload a part of it"]))
        return FAILED
    return 0


def arguments(upload: Path, out: Path, limits: Limits, columns: Mapping[str, str]) -> list[str]:
    """Return the arguments of this module's process."""
    return [str(upload), str(out), json.dumps(asdict(limits)), json.dumps(dict(columns))]


def _confine(limits: Limits) -> None:
    pa.set_memory_pool(pa.system_memory_pool())  # the other pools reserve memory that they may never use
    pa.set_cpu_count(1)
    for limit, most in (
        (resource.RLIMIT_DATA, limits.memory_mb * MB),
        (resource.RLIMIT_CPU, limits.seconds),
        (resource.RLIMIT_FSIZE, limits.unpacked_mb * MB),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _check_size(upload: Path, limits: Limits) -> None:
    """Check the size by the footer of Parquet, or by unpacking text without keeping it.

    A damaged file passes: its reader raises the error.
    """
    with upload.open("rb") as file:
        head = file.read(4)
    if head == MAGIC:
        size, rows, values = _by_footer(upload)
    else:
        size, rows = _by_unpacking(upload, head[:2] == _GZIP, limits.unpacked_mb * MB)
        values = 0
    if size > limits.unpacked_mb * MB:
        raise _too_much(f"unpacks to more than {limits.unpacked_mb} MB")
    _check_amounts(limits, rows, values)


def _by_footer(upload: Path) -> tuple[int, int, int]:
    """Return the number of bytes when unpacked, of rows, and of values in the longest column."""
    try:
        footer = pq.read_metadata(upload)
    except (pa.ArrowException, OSError):
        return 0, 0, 0
    groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
    values = [sum(group.column(at).num_values for group in groups) for at in range(footer.num_columns)]
    return sum(group.total_byte_size for group in groups), footer.num_rows, max(values, default=0)


def _by_unpacking(upload: Path, packed: bool, most: int) -> tuple[int, int]:
    """Return the number of bytes, and of lines after the first; reading stops a little above `most` bytes."""
    size = lines = 0
    try:
        with gzip.open(upload) if packed else upload.open("rb") as stream:
            while size <= most and (block := stream.read(MB)):
                size += len(block)
                lines += block.count(b"\n")
    except (OSError, EOFError, zlib.error):
        pass
    return size, lines - 1


def _bounded(workload: Workload, limits: Limits) -> Workload:
    """Return a workload that raises UserError when it has too many requests, which pages hold in memory."""

    def counted() -> Iterator[WorkloadRequest]:
        segments = characters = 0
        for number, request in enumerate(workload.requests, 1):
            segments += len(request.prompt)
            characters += sum(len(name) for name, _ in request.prompt)
            characters += len(request.tenant) + len(request.slo_class) + len(request.session)
            _check_amounts(limits, number, segments, characters)
            yield request

    return replace(workload, requests=counted())


def _check_amounts(limits: Limits, requests: int, segments: int, characters: int = 0) -> None:
    if requests > limits.requests:
        raise _too_much(f"has more than {limits.requests:,} requests")
    if segments > limits.segments:
        raise _too_much(f"has more than {limits.segments:,} segments of prompts")
    if characters > limits.names_mb * MB:
        raise _too_much(f"has more than {limits.names_mb} MB of names")


def _too_much(what: str) -> UserError:
    return UserError("trace", "the upload", f"{what}; upload a part of it")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), Limits(**json.loads(sys.argv[3])), json.loads(sys.argv[4])))
