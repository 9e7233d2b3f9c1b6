"""Recordings in a few archives: a run leaves no more than eight files, each small enough to be carried."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

_ARCHIVE_BYTES = 15_000_000


def pack(recording: Path, out: Path) -> None:
    """Add the folder `recording` to the last of `out`'s archives, or to a new one if that would be too large.

    The archive is replaced in one rename: those before it are safe from whatever happens now.
    """
    archives = sorted(out.glob("recordings-*.tar"), key=lambda path: int(path.stem.rpartition("-")[2]))
    size = sum(file.stat().st_size for file in recording.iterdir())
    if not archives or archives[-1].stat().st_size + size > _ARCHIVE_BYTES:
        archives.append(out / f"recordings-{len(archives) + 1}.tar")
    temporary = archives[-1].with_suffix(".part")
    if archives[-1].exists():
        shutil.copyfile(archives[-1], temporary)
    with tarfile.open(temporary, "a") as archive:
        archive.add(recording, arcname=recording.name)
    temporary.replace(archives[-1])


def unpack(out: Path, into: Path) -> list[Path]:
    """Every recording in `out`'s archives, as folders in `into`, by name."""
    into.mkdir(parents=True, exist_ok=True)
    for path in out.glob("recordings-*.tar"):
        with tarfile.open(path) as archive:
            archive.extractall(into, filter="data")
    return sorted(into.iterdir())
