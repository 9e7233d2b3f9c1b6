"""What a run of the suite has found so far: one JSON file, rewritten whole whenever something is added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """A dict that is on disk after every `add`; a suite that is cut short loses nothing it measured."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Set `name` and write everything."""
        self.found[name] = value
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    @classmethod
    def load(cls, path: Path) -> dict[str, Any]:
        """What a suite wrote."""
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
