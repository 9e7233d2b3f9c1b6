"""The results of a run of the suite so far: a file that grows by a line at a time.

Each phase is a separate process and appends each result at once, so a phase that is killed keeps its results. Nothing
is ever rewritten: if two lines set the same name, the later line counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = "results.jsonl"
_STAND_INS = {"copy_bytes_per_s": 4.3e12, "gemm_flops_per_s": 788e12}  # another H200, torch 2.11, 2026-10-28


SLOW_CLOCK = 0.6  # below this fraction of its highest clock, a GPU is not the GPU that is to be measured


class Progress(NamedTuple):
    """The progress of a phase.

    Attributes:
        units: number of its units, and `begun` of those that have begun
        planned, done: work that is planned and that is done: units, unless the phase counts something finer
        clock: lowest mean clock of the GPU in a unit, as a fraction of its highest; None if it is not known
        slow: number of units whose mean clock was below `SLOW_CLOCK`
    """

    units: int = 0
    begun: int = 0
    planned: int = 0
    done: int = 0
    clock: float | None = None
    slow: int = 0

    def at_clock(self, clock: float | None) -> Progress:
        """Return the progress after a unit with this mean clock."""
        if clock is None:
            return self
        lowest = clock if self.clock is None else min(self.clock, clock)
        return self._replace(clock=round(lowest, 3), slow=self.slow + (clock < SLOW_CLOCK))


def progress_of(results: dict[str, Any], phase: str) -> Progress:
    """Return the progress of a phase; nothing is planned in a phase that did not run."""
    return Progress(**(results.get(f"{phase}_progress") or {}))


def phases_of(results: dict[str, Any]) -> list[str]:
    """Return the names of the phases that ran, in their order."""
    return [name.removesuffix("_progress") for name, value in results.items() if name.endswith("_progress") and value]


class Results:
    """The file `results.jsonl` in `folder`; each line sets a named value, or adds a row to a named list."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def set(self, name: str, value: Any) -> None:
        self._append({"name": name, "value": value})

    def add(self, name: str, row: Any) -> None:
        """Append `row` to the list `name`."""
        self._append({"name": name, "row": row})

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            # The leading newline ends a partial line of a process that was killed.
            file.write(f"\n{json.dumps(line)}")

    def progress(self, phase: str) -> Progress:
        return progress_of(self.values, phase)

    @property
    def values(self) -> dict[str, Any]:
        """All results so far, by name."""
        return load(self._path.parent) if self._path.is_file() else {}


def load(folder: Path) -> dict[str, Any]:
    """Return the results that a suite wrote into `folder`, without an incomplete line of a process that was killed.

    Raises OSError if there is no such file, and ValueError if it has no line of results.
    """
    results: dict[str, Any] = {}
    text = (folder / FILE).read_text(encoding="utf-8")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if "row" in entry:
                results.setdefault(entry["name"], []).append(entry["row"])
            else:
                results[entry["name"]] = entry["value"]
        except (ValueError, KeyError, TypeError):
            continue
    if text.strip() and not results:
        raise ValueError("no line of it is a result")
    return results


def ceilings_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the ceilings of `measure_ceilings` by name; those of another H200 if this run measured none."""
    return _STAND_INS | {row["ceiling"]: row["value"] for row in results.get("ceilings", [])}


def stand_ins(results: dict[str, Any]) -> list[str]:
    """Return the names of the ceilings that are another H200's, because this run did not measure them."""
    measured = {row["ceiling"] for row in results.get("ceilings", [])}
    return [name for name in _STAND_INS if name not in measured]
