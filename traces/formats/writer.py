"""One way to write any workload: written to a file beside its place, then moved there as a whole.

A format is a function listed in `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from serving.errors import UserError
from serving.whole_file import write_whole
from serving.workload import Workload
from traces.formats.mooncake import write_mooncake
from traces.formats.parquet import write_parquet

WRITERS: dict[str, Callable[[Workload, Path], None]] = {"parquet": write_parquet, "mooncake": write_mooncake}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "mooncake"}


def write_workload(workload: Workload, path: str | Path, format: str | None = None, overwrite: bool = False) -> None:
    """Write `workload` to the file `path`, in full or not at all.

    `format` is a key of `WRITERS`; by default the name decides, `.parquet` or `.jsonl` (Mooncake). Raises
    UserError if the file exists and `overwrite` is not set, or if it cannot be written.
    """
    path = Path(path)
    name = format or _SUFFIXES.get(path.suffix)
    if name not in WRITERS:
        formats, suffixes = " or ".join(WRITERS), " or ".join(_SUFFIXES)
        remedy = f"does not say the format; give --to {formats}, or a name that ends in {suffixes}"
        raise UserError("format", format or path.name, remedy)
    write_whole(path, partial(WRITERS[name], workload), overwrite)
