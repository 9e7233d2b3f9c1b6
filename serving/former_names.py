"""Names that files of tokentwin 0.2 and before have for what is now called `trust`, which has a `level`."""

from __future__ import annotations

from typing import Any

_NOW = {"standing": "trust", "standing_reason": "trust_reason", "mark": "level"}


def present_name(name: str) -> str:
    """Return the present name of a key or a column."""
    return _NOW.get(name, name)


def with_present_names(value: Any) -> Any:
    """Return plain JSON with the present names of its keys, at any depth."""
    if isinstance(value, dict):
        return {present_name(name): with_present_names(part) for name, part in value.items()}
    return [with_present_names(part) for part in value] if isinstance(value, list) else value
