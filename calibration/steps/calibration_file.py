"""Calibrations as files: written whole or not at all, and never read where a number in them is impossible."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from serving.errors import UserError, reason
from serving.json_file import read_json_file
from serving.whole_file import whole_file

Made = TypeVar("Made")

Price = Annotated[float, Field(ge=0, lt=1e12)]
"""A factor, or nanoseconds."""


def save(calibration: Any, path: Path) -> None:
    """Write a calibration, a dataclass. Raises UserError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("out", str(path.parent), f"cannot be written: {reason(error)}") from None


def read(path: Path, format: int) -> dict[str, Any]:
    """What a file of that format holds. Raises UserError for any other."""
    data = read_json_file(path, "calibration", "; tokentwin calibrate makes one")
    found = data.get("format") if isinstance(data, dict) else None
    if found != format:
        raise UserError("calibration", str(path), f"has format {found}, not {format}; calibrate again")
    return dict(data)


def checked(kind: type[Made], data: Any, where: str) -> Made:
    """`data` as a dataclass. Raises UserError, one line, that names what is wrong."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = ".".join(map(str, first["loc"]))
        raise UserError("calibration", where, f"is damaged ({wrong}: {first['msg']}); calibrate again") from None
