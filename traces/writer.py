"""One way out for any workload: written beside its place, then moved there whole.

A format is a function listed in `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serving.errors import UserError, reason
from serving.whole_file import whole_file
from serving.workload import Workload
from traces.mooncake import write_mooncake
from traces.parquet import write_parquet

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
        remedy = f"choose a format, {' or '.join(WRITERS)}, or a name that ends in {' or '.join(_SUFFIXES)}"
        raise UserError("format", format or path.name, remedy)
    if path.exists() and not (overwrite and path.is_file()):
        raise UserError("output", str(path), "exists; use --force to overwrite a file, or choose another name")
    try:
        with whole_file(path) as partial:
            WRITERS[name](workload, partial)
    except OSError as error:
        raise UserError("output", str(path), f"cannot be written: {reason(error)}") from None
