"""Telling one process from another that later got its number: by when it started.

From `/proc` (proc(5), `stat`): field 3 is the state, field 22 the start time in clock ticks since boot.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessMark(NamedTuple):
    """A process: its number, and the tick at which it started."""

    pid: int
    start_tick: int

    @property
    def alive(self) -> bool:
        """Whether this very process runs; one that has ended and was not waited for does not."""
        return mark_of(self.pid) == self

    def kill_group(self) -> None:
        """End it and everything in its process group, at once. Nothing if it is gone."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def mark_of(pid: int) -> ProcessMark | None:
    """The mark of a running process; None if there is none of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name of the program before it may hold anything
    return None if fields[0] in "ZX" else ProcessMark(pid, int(fields[19]))
