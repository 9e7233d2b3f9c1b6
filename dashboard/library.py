"""Recordings, calibrations and validation reports under the runs directory, recognised by the files they hold.

Names are paths relative to that directory. A name from a URL is only looked up among them, and never used as a path.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tokentwin.calibration.steps.external_calibration import LEARNT_FILES

RECORDING = "requests.parquet"
OWN_CALIBRATION = "calibration.json"
DEEPEST = 5
MOST = 500
_SETTLED_NS = 2_000_000_000  # a younger directory may change again without a change of its modification time


_Entries = tuple[frozenset[str], tuple[str, ...]]  # names of files, and of directories that are no links


def find(runs: Path, filename: str, *also: str | None) -> dict[str, Path]:
    """Return directories under `runs` (itself included) that hold `filename`, by name, newest first.

    It searches `DEEPEST` levels deep, and leaves out hidden directories. If there are more than `MOST`, it returns the
    newest directories and those in `also`, which a link may name.
    """
    dated = {
        name or runs.resolve().name: (_modified(f"{at}/{filename}"), at)
        for name, at, files in _walk(str(runs), "", DEEPEST)
        if filename in files
    }
    names = sorted(dated, key=lambda name: (-dated[name][0], name))
    return {name: Path(dated[name][1]) for at, name in enumerate(names) if at < MOST or name in also}


def calibrations(runs: Path) -> dict[str, Path]:
    """Return directories under `runs` that hold a calibration, of our own engine or of another, by name."""
    return {path: where for file in (OWN_CALIBRATION, *LEARNT_FILES) for path, where in find(runs, file).items()}


def stamp(directory: Path) -> int:
    """Return a number that changes with every write of a file in the directory; caches use it as a key."""
    return max((_modified(str(path)) for path in directory.iterdir()), default=0)


def _walk(at: str, name: str, levels: int) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield every directory: its name relative to the first, its path, and its files."""
    files, directories = _looked_at(at)
    yield name, at, files
    if levels:
        for below in directories:
            yield from _walk(f"{at}/{below}", f"{name}/{below}" if name else below, levels - 1)


def _looked_at(directory: str) -> _Entries:
    modified = _modified(directory)
    read = _entries if time.time_ns() - modified > _SETTLED_NS else _entries.__wrapped__
    return read(directory, modified)


@lru_cache(maxsize=50_000)
def _entries(directory: str, modified: int) -> _Entries:
    files, directories = set(), []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.is_dir():
                    files.add(entry.name)
                elif not entry.name.startswith(".") and not entry.is_symlink():
                    directories.append(entry.name)
    except OSError:
        pass  # the directory is gone, or may not be read
    return frozenset(files), tuple(directories)


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
