"""What lies under the runs directory: recordings and validation reports, found by the files they hold.

Names are paths relative to that directory and are only ever looked up in what was found: a name from a URL is
never used as a path.
"""

from __future__ import annotations

import os
from pathlib import Path

RECORDING = "requests.parquet"
REPORT = "report.json"
DEEPEST = 5
MOST = 500


def find(runs: Path, filename: str) -> dict[str, Path]:
    """Directories under `runs` (itself included) that hold `filename`, by name, newest first.

    Looks `DEEPEST` levels down, leaves hidden directories out, and stops at `MOST`.
    """
    found: dict[str, Path] = {}
    for directory, below, files in os.walk(runs):
        path = Path(directory)
        depth = len(path.relative_to(runs).parts)
        below[:] = sorted(name for name in below if not name.startswith(".")) if depth < DEEPEST else []
        if filename in files:
            found[path.relative_to(runs).as_posix() if depth else path.resolve().name] = path
        if len(found) >= MOST:
            break
    return dict(sorted(found.items(), key=lambda item: (-_modified(item[1] / filename), item[0])))


def stamp(directory: Path) -> int:
    """Changes whenever a file of the directory is written: the key under which its content is cached."""
    return max((_modified(path) for path in directory.iterdir()), default=0)


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
