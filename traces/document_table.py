"""Arrow tables of a document's parts, with a column for each plain field and its unit and definition as metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def table_of(kind: type[BaseModel], rows: Iterable[BaseModel | Mapping[str, Any]]) -> pa.Table:
    """Return a table with one row for each of `rows`, which are instances of `kind` or mappings with its fields."""
    schema = pa.schema([field for name, info in kind.model_fields.items() if (field := _field(name, info)) is not None])
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def _field(name: str, info: FieldInfo) -> pa.Field | None:
    """Return the Arrow field of a model's field, or None if the field is neither text, a number nor a flag."""
    kind = info.annotation
    kinds = [one for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if one in _TYPES]
    if not kinds:
        return None
    about = {"definition": info.description or ""}
    if kinds[0] in (int, float):
        about = {"unit": (info.json_schema_extra or {}).get("unit", ""), **about}  # type: ignore[union-attr,dict-item]
    return pa.field(name, _TYPES[kinds[0]], metadata=about)
