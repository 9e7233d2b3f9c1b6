"""The things that can be exported: recordings, and the answers of plan, compare, diagnose, sweep and validate."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Protocol

import pyarrow as pa

from tokentwin.serving.answers.document import Document
from tokentwin.serving.data_file import no_constant, parse_json
from tokentwin.serving.errors import UserError, reason

ANSWER = "result.json"  # the file in a job's directory
_KNOWN = (
    "cannot be exported; give a recording, the directory of a sweep or of a validation report, or a file from "
    "`plan --save`, `compare --save` or `diagnose --save`"
)


class Exportable(Protocol):
    """Something that has tables; `what` says in messages what it is, such as `a plan`."""

    what: ClassVar[str]

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its tables, the default table first."""

    def table(self, name: str) -> pa.Table:
        """Return one of the tables. Raises a one-line UserError if the data are damaged."""


def open_exportable(path: Path) -> Exportable:
    """Read and check the run or answer at `path`. Raises UserError if it cannot be exported, or is damaged."""
    if path.is_file():
        return _answer(path)
    if any((path / f"{name}.parquet").exists() for name in ("runs", "requests")):
        from tokentwin.planning.exports.recorded_run import RecordedRun

        return RecordedRun(path)
    if (path / "sweep.json").exists():
        from tokentwin.planning.exports.sweep import Sweep

        return Sweep(path)
    if (path / "report.json").exists():
        from tokentwin.planning.exports.validation import Validation

        return Validation(path)
    if (path / ANSWER).is_file():
        return _answer(path / ANSWER)
    raise UserError("source", str(path), _KNOWN if path.exists() else "does not exist")


def _answer(path: Path) -> Document:
    """Read an answer. Its kind is recognised by a field that no other kind of answer has."""
    from tokentwin.planning.compare.document import ComparisonDocument
    from tokentwin.planning.diagnose.document import DiagnosisDocument
    from tokentwin.planning.plan.document import PlanDocument
    from tokentwin.planning.plan.most_clients import MostClientsDocument

    try:
        document = parse_json(path.read_bytes(), parse_constant=no_constant)
    except OSError as error:
        raise UserError("source", str(path), f"cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise UserError("source", str(path), f"{error}; {_KNOWN}") from None
    kinds: dict[str, type[Document]] = {
        "recommendation": PlanDocument,
        "fleets": MostClientsDocument,
        "tallies": ComparisonDocument,
        "counterfactuals": DiagnosisDocument,
    }
    for field, kind in kinds.items():
        if isinstance(document, dict) and field in document:
            return kind.read(document)
    raise UserError("source", str(path), _KNOWN)
