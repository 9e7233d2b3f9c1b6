"""An answer as it is saved: a JSON document, checked when it is read, and written again byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from serving.config import parse


class Part(BaseModel):
    """A part of a document. What a later version adds is ignored; numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Asked(Part):
    """What every answer says of where it comes from: `asked` is `{"command": ...}`, or the inputs of a page."""

    version: str = ""
    asked: dict[str, Any] = {}


def checked(model: type[BaseModel], document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The document as it is. Raises UserError with its first field that is wrong."""
    parse(model, document, where=where)
    return dict(document)


def write_json(source: Any, out: IO[bytes]) -> None:
    """The document of an answer."""
    out.write(json.dumps(source.document, indent=1, allow_nan=False).encode() + b"\n")


def rows_of(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Some fields of each part, None where it has none."""
    return [{name: part.get(name) for name in names} for part in parts]
