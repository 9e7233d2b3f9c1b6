"""Former names of `trust` and its `level`, which files of tokentwin 0.2 and earlier use."""

from __future__ import annotations

from typing import Any

_NOW = {"standing": "trust", "standing_reason": "trust_reason", "mark": "level"}


def present_name(name: str) -> str:
    """Return the present name of a key or a column."""
    return _NOW.get(name, name)


def with_present_names(value: Any) -> Any:
    """Return plain JSON data with its keys renamed to their present names, at any depth."""
    if isinstance(value, dict):
        return {present_name(name): with_present_names(part) for name, part in value.items()}
    return [with_present_names(part) for part in value] if isinstance(value, list) else value
