"""The JSON objects in columns of `runs`: checks of the entries that we read, made when a recording is opened.

The objects come from a file that anyone may have written. Other entries are allowed and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from serving.data_file import parse_json
from serving.deployments.config import parse
from serving.errors import UserError
from serving.front_door import FrontDoor


class _Experts(BaseModel):
    experts: int = Field(ge=1)
    topk: int = Field(ge=1)


class _Served(BaseModel):
    speed: float = 1.0


class _Notes(BaseModel):
    """The notes that are read; `traces.recording_notes` says what they mean."""

    gpu: str | None = None
    standing: dict[str, Any] | None = None
    bands: dict[str, dict[str, tuple[float, float]]] | None = None
    front_door: FrontDoor | None = None
    experts: _Experts | None = None
    served: _Served | None = None
    launching_share: float | None = None
    canary_before_ns: int = 0
    canary_after_ns: int = 0


class _Hardware(BaseModel):
    gpu: str | None = None


class _Deployment(BaseModel):
    """The deployment of any engine; deployments of our own are read as `Deployment`."""

    model: str | None = None
    scheduler: dict[str, Any] | None = None


_OBJECTS: dict[str, type[BaseModel]] = {"deployment": _Deployment, "hardware": _Hardware, "notes": _Notes}


def check_objects(run: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a column of the row `run` that is neither empty nor an object of its model."""
    for name, model in _OBJECTS.items():
        text, field = run[name], f"{where}: {name}"
        if not text:
            continue
        try:
            value = parse_json(text)
            if not isinstance(value, dict):
                raise ValueError("must be a JSON object")
        except ValueError as error:
            raise UserError(field, text, f"{error}; record the run again") from None
        parse(model, value, field)
