"""The base of all objects in a request's body; it refuses unknown fields, and objects with very many fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_MOST_FIELDS = 256  # a body of 4 MB can have a million unknown fields, and an error for each would take gigabytes


class Limited(BaseModel):
    """An object with at most 256 fields, all of which are known."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        return _limited(given, _MOST_FIELDS)


def at_most(entries: int) -> BeforeValidator:
    """Return a validator that refuses an object with more than `entries` fields before it looks at them."""
    return BeforeValidator(lambda given: _limited(given, entries))


def _limited(given: Any, most: int) -> Any:
    if isinstance(given, dict) and len(given) > most:
        raise ValueError(f"must have at most {most} fields")
    return given
