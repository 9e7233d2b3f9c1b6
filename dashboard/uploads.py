"""What a user hands over: a trace, or a model's config.json. Read as data, checked, and kept under its hash.

Nothing of an upload is executed, and no name in it or of it becomes a path: traces go through the readers of `traces`
from a temporary file, and what is kept are their requests, not the bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serving.errors import UserError
from serving.model_spec import ModelSpec
from serving.workload import Workload, WorkloadRequest
from tokentwin.jobs.files import write_json
from traces.reader import read_workload
from traces.writer import write_workload

MOST_MB = 50
MOST_UNPACKED_MB = 500
MOST_REQUESTS = 500_000
MOST_LAYERS = 1000
_LARGEST = 10**12
_MB = 1_000_000
_DIGEST = re.compile(r"[0-9a-f]{16}")


def keep_trace(runs: Path, content: bytes) -> str:
    """The digest under which the requests of an uploaded trace are kept. Raises UserError, one line, if it is none."""
    digest = _digest(content)
    path = _trace(runs, digest)
    if not path.is_file():
        _check_size(content)
        with tempfile.TemporaryDirectory() as folder:
            upload = Path(folder) / "upload"
            upload.write_bytes(content)
            try:
                workload = _few_enough(read_workload(upload))
                _kept(lambda: write_workload(workload, path, overwrite=True), path)
            except UserError as error:
                raise _of_the_upload(error, upload) from None
    return digest


def trace_path(runs: Path, digest: str) -> Path | None:
    """Where the requests of a digest lie; None for what is no digest, or none of a trace that is here."""
    path = _trace(runs, digest) if _DIGEST.fullmatch(digest) else None
    return path if path is not None and path.is_file() else None


def missing(what: str, how: str) -> str:
    """What to do about what a link names and is not here; `how` is a verb."""
    return f"The {what} of this link is not on this server, which has only what was handed to it: {how} it again."


def keep_model(runs: Path, text: str) -> str:
    """The digest under which a pasted config.json is kept. Raises UserError, one line, if it describes no model."""
    if len(text) > _MB:
        raise UserError(
            "config.json", f"{len(text) / _MB:.1f} MB", "is larger than any config.json; paste the text of one"
        )
    try:
        data = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UserError("config.json", "the text", f"is not JSON: {error}") from None
    _check_numbers(data)
    ModelSpec.from_hf_config(data, "pasted")
    digest = _digest(json.dumps(data, sort_keys=True).encode())
    path = _model(runs, digest) / "config.json"
    if not path.is_file():
        _kept(lambda: write_json(path, data), path)
    return digest


def model_path(runs: Path, digest: str) -> Path | None:
    """The folder of a pasted config.json; None for what is no digest, or none that is here."""
    folder = _model(runs, digest) if _DIGEST.fullmatch(digest) else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _check_numbers(data: Any) -> None:
    """No size of a model is so large: what is counted up to one would never end."""
    for name, value in data.items() if isinstance(data, dict) else ():
        most = MOST_LAYERS if "layers" in name else _LARGEST
        if isinstance(value, int | float) and abs(value) > most:
            raise UserError(f"config.json: {name}", value, f"is too large; {most:,} is allowed")


def _trace(runs: Path, digest: str) -> Path:
    return runs.resolve() / "uploads" / f"{digest}.parquet"


def _model(runs: Path, digest: str) -> Path:
    return runs.resolve() / "uploads" / f"model-{digest}"


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _kept(write: Callable[[], None], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise UserError("runs", str(path.parent), f"cannot be written: {error.strerror}") from None


def _of_the_upload(error: UserError, path: Path) -> UserError:
    """The same without the name of the temporary file, which the readers know it by."""
    if error.field == "trace":
        return UserError("trace", "the upload", error.remedy)
    return UserError(error.field.replace(f"{path}:", "trace, line "), error.value, error.remedy)


def _check_size(content: bytes) -> None:
    """A small file may unpack into one that fills the memory: found out before a reader does."""
    if len(content) > MOST_MB * _MB:
        raise UserError("trace", f"{len(content) / _MB:.0f} MB", f"is too large; {MOST_MB} MB are allowed")
    if _unpacked(content) > MOST_UNPACKED_MB * _MB:
        raise UserError("trace", "the upload", f"unpacks to more than {MOST_UNPACKED_MB} MB; upload a part of it")


def _few_enough(workload: Workload) -> Workload:
    """The same, whose requests end in a UserError where they are too many: the pages have all of them in memory."""

    def counted() -> Iterator[WorkloadRequest]:
        for number, request in enumerate(workload.requests):
            if number == MOST_REQUESTS:
                raise UserError(
                    "trace", "the upload", f"holds more than {MOST_REQUESTS:,} requests; upload a part of it"
                )
            yield request

    return replace(workload, requests=counted())


def _unpacked(content: bytes) -> int:
    if content[:4] == b"PAR1":
        try:
            groups = pq.ParquetFile(BytesIO(content)).metadata
        except pa.ArrowException:
            return 0  # the reader says what is wrong with it
        return sum(groups.row_group(at).total_byte_size for at in range(groups.num_row_groups))
    if content[:2] != b"\x1f\x8b":
        return len(content)
    size = 0
    try:
        with gzip.open(BytesIO(content)) as stream:
            while size <= MOST_UNPACKED_MB * _MB and (block := stream.read(_MB)):
                size += len(block)
    except (OSError, EOFError, zlib.error):
        return size
    return size
