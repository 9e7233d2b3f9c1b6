"""Uploads of users: a trace, or a model's config.json. They are read as data, checked, and kept under their hash.

Nothing of an upload is executed, except a policy (`tokentwin.dashboard.own_policy`). Neither its name nor a name in it
becomes a
path: traces go through the readers of `traces` from a temporary file, in a process with limits (`upload_process`), and
their requests are kept, not the bytes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokentwin.dashboard import upload_process
from tokentwin.dashboard.upload_process import FAILED, MB, Limits
from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.errors import UserError
from tokentwin.serving.python_process import module_command, module_environment
from tokentwin.serving.whole_file import write_whole
from tokentwin.traces.formats.rows import SAY_COLUMNS

MOST_MB = 50
LIMITS = Limits()
MOST_LAYERS = 1000
_LARGEST = 10**12
_DIGEST = re.compile(r"[0-9a-f]{16}")
_TRACE, _MODEL = "*.parquet", "model-*/config.json"


def keep_trace(runs: Path, content: bytes, name: str = "", columns: Mapping[str, str] = MappingProxyType({})) -> str:
    """Keep the requests of an uploaded trace, with the name of its first upload, and return their digest.

    The digest is the beginning of the SHA-256 of `content`, and of `columns` if they are stated: the column of each
    field. Raises UserError, one line, if `content` is no trace.
    """
    said = json.dumps(dict(columns), sort_keys=True).encode() if columns else b""
    digest = sha256(content + said).hexdigest()[:16]
    path = _path(runs, _TRACE, digest)
    if not path.is_file():
        if len(content) > MOST_MB * MB:
            raise UserError("trace", f"{len(content) / MB:.0f} MB", f"is too large; at most {MOST_MB} MB are allowed")
        with _written_below(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix=".reading-") as folder:
            upload, requests = Path(folder) / "upload", Path(folder) / "requests.parquet"
            upload.write_bytes(content)
            _read(upload, requests, columns)
            requests.replace(path)
            if name:
                write_json(_name_of(path), plain_name(name))
    return digest


def plain_name(name: str) -> str:
    """Return a file's name as it can stand in a link: its last part, without special characters."""
    return re.sub(r"[^\w.+-]+", "_", name.replace("\\", "/").rpartition("/")[2])[:60]


def trace_name(path: Path) -> str:
    """Return the name of the uploaded file that is kept at `path`; without one the name of `path`."""
    name = read_json(_name_of(path))
    return name if isinstance(name, str) else path.name


def _name_of(path: Path) -> Path:
    return path.with_suffix(".name.json")


def trace_path(runs: Path, digest: str) -> Path | None:
    """Return the path of the requests with this digest; None if it is invalid or unknown."""
    return _kept(runs, _TRACE, digest)


def keep_model(runs: Path, text: str) -> str:
    """Keep a pasted config.json, and return its digest. Raises UserError, one line, if it describes no model."""
    if len(text) > MB:
        raise UserError(
            "config.json", f"{len(text) / MB:.1f} MB", "is too large for a config.json; paste the text of a config.json"
        )
    try:
        data = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UserError("config.json", "the text", f"is not JSON: {error}") from None
    _check_numbers(data)
    spec_from_hf_config(data, "pasted")
    return keep_document(runs, _MODEL, data)


def model_path(runs: Path, digest: str) -> Path | None:
    """Return the folder of a pasted config.json; None if the digest is invalid or unknown."""
    config = _kept(runs, _MODEL, digest)
    return config and config.parent


def keep_document(runs: Path, place: str, data: Any) -> str:
    """Keep `data` as JSON in `place`, a path in which `*` stands for the digest, and return the digest."""
    digest = sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
    path = _path(runs, place, digest)
    if not path.is_file():
        with _written_below(path.parent):
            write_json(path, data)
    return digest


def kept_document(runs: Path, place: str, digest: str) -> Any:
    """Return the document that `keep_document` kept; None if the digest is invalid or unknown."""
    path = _kept(runs, place, digest)
    return path and read_json(path)


def keep_file(runs: Path, place: str, content: bytes) -> str:
    """Keep a file in `place`, a path in which `*` stands for the digest, and return the digest."""
    digest = sha256(content).hexdigest()[:16]
    path = _path(runs, place, digest)
    if not path.is_file():
        with _written_below(path.parent):
            write_whole(path, lambda partial: partial.write_bytes(content), True)
    return digest


def kept_file(runs: Path, place: str, digest: str) -> Path | None:
    """Return the path of a file that `keep_file` kept; None if the digest is invalid or unknown."""
    return _kept(runs, place, digest)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _check_numbers(data: Any) -> None:
    """Raise UserError for a size that no model has, because a loop up to it would never end."""
    for name, value in data.items() if isinstance(data, dict) else ():
        most = MOST_LAYERS if "layers" in name else _LARGEST
        if isinstance(value, int | float) and abs(value) > most:
            raise UserError(f"config.json: {name}", value, f"is too large; at most {most:,} is allowed")


def _path(runs: Path, place: str, digest: str) -> Path:
    return runs.resolve() / "uploads" / place.replace("*", digest)


def _kept(runs: Path, place: str, digest: str) -> Path | None:
    path = _path(runs, place, digest) if _DIGEST.fullmatch(digest) else None
    return path if path is not None and path.is_file() else None


@contextmanager
def _written_below(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError("runs", str(folder), f"cannot be written: {error.strerror}") from None


def _read(upload: Path, requests: Path, columns: Mapping[str, str]) -> None:
    """Write the requests of a trace to a file of their own, in a process that may end in any way."""
    command = module_command(upload_process.__name__, *upload_process.arguments(upload, requests, LIMITS, columns))
    done = subprocess.run(command, env=module_environment(), stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode == FAILED and done.stdout:
        raise _of_the_upload(UserError(*json.loads(done.stdout)), upload)
    if done.returncode:
        raise UserError(
            "trace", "the upload", "takes too much time or memory to read, or is damaged; upload a part of it"
        )


def _of_the_upload(error: UserError, path: Path) -> UserError:
    """Return the error without the name of the temporary file that the readers were given."""
    if error.field == "trace":
        return UserError("trace", "the upload", error.remedy)
    remedy = error.remedy.replace(f" ({SAY_COLUMNS})", " below")
    return UserError(error.field.replace(f"{path}:", "trace, line "), error.value, remedy)
