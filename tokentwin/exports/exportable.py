"""What can be exported: recordings, and the answers of plan, compare, sweep and validate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from serving.errors import UserError, reason

if TYPE_CHECKING:
    import pyarrow as pa

ANSWER = "result.json"  # in the directory of a job
_DIRECTORIES = {  # by the file that tells them
    "requests.parquet": "tokentwin.exports.recorded_run:RecordedRun",
    "sweep.json": "tokentwin.exports.sweep:Sweep",
    "report.json": "tokentwin.exports.validation:Validation",
}
_ANSWERS = {  # by a field that no other answer has
    "recommendation": "tokentwin.exports.plan:PlanAnswer",
    "tallies": "tokentwin.exports.comparison:ComparisonAnswer",
}
_KNOWN = (
    "is none of: a recording, the directory of a sweep or of a validation report, the saved answer of "
    "`plan --save` or `compare --save`"
)


class Exportable(Protocol):
    """Something that has tables, and can be written in other formats.

    what     what messages call it, such as `a plan`
    writers  `module:function` of it and a binary file, for every format that is not tabular
    """

    what: ClassVar[str]
    writers: ClassVar[Mapping[str, str]]

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that it has, the default first."""
        ...

    def table(self, name: str) -> pa.Table:
        """One of them. Raises UserError, one line, if it is damaged."""
        ...


def open_exportable(path: Path) -> Exportable:
    """What lies at `path`, read and checked. Raises UserError if that is nothing that can be exported, or damaged."""
    if path.is_file():
        return _answer(path)
    for file, kind in _DIRECTORIES.items():
        if (path / file).exists():
            found: Exportable = named(kind)(path)
            return found
    if (path / ANSWER).is_file():
        return _answer(path / ANSWER)
    raise UserError("source", str(path), _KNOWN if path.exists() else "does not exist")


def named(path: str) -> Any:
    """The function or class `module:name`. Raises UserError when a package that it needs is not installed."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        remedy = "is needed for this format and not installed; pip install 'tokentwin[dashboard]'"
        raise UserError("export", str(error.name), remedy) from None


def _answer(path: Path) -> Exportable:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("source", str(path), f"cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError):
        raise UserError("source", str(path), _KNOWN) from None
    for field, kind in _ANSWERS.items():
        if isinstance(document, dict) and field in document:
            found: Exportable = named(kind)(document)
            return found
    raise UserError("source", str(path), _KNOWN)
