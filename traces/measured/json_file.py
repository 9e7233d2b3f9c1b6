"""A JSON file of a measurement, with values at dotted paths such as `successes.latency.request_latency.mean`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentwin.serving.data_file import parse_json
from tokentwin.serving.errors import UserError
from tokentwin.traces.formats.rows import read_head

MOST = 9e9  # default limit of numbers; this number of seconds fits into 64 bits of nanoseconds
MANY = 10**8  # maximum number of tokens of a request, and of requests of a run
_LARGEST = 1 << 30  # maximum size in bytes; a detailed result of a million requests is smaller


class JsonFile:
    """The JSON object in the file `path`, plain or gzipped. Raises UserError if the file has no JSON object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = parse_json(read_head(path, _LARGEST))
        except ValueError as error:
            raise UserError("measured", str(path), str(error)) from None
        if not isinstance(data, dict):
            raise UserError("measured", str(path), "must be a JSON object")
        self.data: dict[str, Any] = data

    def get(self, path: str) -> Any:
        """Return the value at a dotted path; None if there is none."""
        value: Any = self.data
        for key in path.split("."):
            if isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, path: str, least: float = 0.0, most: float = MOST) -> float:
        """Return a number from `least` to `most` at a dotted path."""
        return self._checked(path, self.get(path), least, most)

    def numbers(self, path: str, least: float = 0.0, most: float = MOST) -> list[float]:
        """Return an array of numbers from `least` to `most` at a dotted path."""
        values = self.get(path)
        if not isinstance(values, list):
            raise self.error(path, values, "must be an array")
        return [self._checked(f"{path}[{i}]", value, least, most) for i, value in enumerate(values)]

    def error(self, path: str, value: object, remedy: str) -> UserError:
        return UserError(f"{self.path}: {path}", value, remedy)

    def _checked(self, path: str, value: Any, least: float, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(path, value, "must be a number")
        if not least <= value <= most:
            raise self.error(path, value, f"must be from {least:g} to {most:g}")
        return float(value)
