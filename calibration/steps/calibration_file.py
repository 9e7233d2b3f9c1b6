"""Calibration files: a file is written completely or not at all, and impossible numbers raise an error on reading."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from tokentwin.serving.data_file import read_json_file
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.whole_file import whole_file

Made = TypeVar("Made")

Price = Annotated[float, Field(ge=0, lt=1e12)]
"""A factor, or nanoseconds."""


def save(calibration: Any, path: Path) -> None:
    """Write a calibration (a dataclass) to a JSON file; raise UserError if writing fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("out", str(path.parent), f"cannot be written: {reason(error)}") from None


def read(path: Path, format: int) -> dict[str, Any]:
    """Return the contents of a file of format `format`; raise UserError for any other file."""
    data = read_json_file(path, "calibration", "; tokentwin calibrate makes one")
    present = data.get("format") if isinstance(data, dict) else None
    if present != format:
        raise UserError("calibration", str(path), f"has format {present}, not {format}; calibrate again")
    return dict(data)


def checked(kind: type[Made], data: Any, where: str) -> Made:
    """Return `data` as a dataclass; raise UserError with the name of the first invalid field."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = ".".join(map(str, first["loc"]))
        raise UserError("calibration", where, f"is damaged ({wrong}: {first['msg']}); calibrate again") from None
