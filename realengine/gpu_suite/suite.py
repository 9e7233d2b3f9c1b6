"""Runs phases one after the other, each in a process of its own with its share of the time.

What one of them does, crashing or hanging included, costs that phase only: it is a line in the results, and the next
one runs. This process never uses the GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from realengine.gpu_suite.phase_process import run_apart
from realengine.gpu_suite.results import FILE, Results, ceilings_of
from realengine.gpu_suite.sizes import Sizes

GRACE_S = 25.0  # a phase that looks at the time ends by itself; one that is this late is killed
_LEFT_BEFORE = (FILE, "kernels.parquet", "calibration.json", "recordings-*.tar")


class Work(NamedTuple):
    """What a phase works with. `scratch` is a folder of this run, `end` is when it should be done, on `monotonic`."""

    sizes: Sizes
    out: Path
    scratch: Path
    results: Results
    commit: str
    end: float

    def left(self) -> float:
        """Seconds until it should be done."""
        return self.end - monotonic()

    @property
    def ceilings(self) -> dict[str, Any]:
        """By name, as measured before, or stand-ins."""
        return ceilings_of(self.results.found)

    def keep(self, name: str, rows: Iterable[dict[str, Any]] | None) -> None:
        """Write rows as they come, to the list `name`, until time is up."""
        for row in rows or ():
            self.results.add(name, row)
            if self.left() < 0:
                break


class Phase(NamedTuple):
    """`run` does it, in a process of its own, and may give rows, which are kept under its name; `after` is done here
    when that has ended, however it did.

    minutes  its share of the suite's time is this, of the sum of those that are run
    """

    name: str
    minutes: float
    run: Callable[[Work], Iterable[dict[str, Any]] | None]
    after: Callable[[Work], None] | None = None


class Suite:
    """One run of `phases`. Everything it writes is in `out`: results.jsonl, kernels.parquet, recordings-N.tar,
    calibration.json. What an earlier run left there is removed, unless `adding`."""

    def __init__(
        self,
        out: Path,
        phases: Sequence[Phase],
        minutes: float,
        sizes: Sizes,
        commit: str = "",
        *,
        adding: bool = False,
        grace_s: float = GRACE_S,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        for path in () if adding else (path for name in _LEFT_BEFORE for path in out.glob(name)):
            path.unlink()
        self.results = Results(out)
        self._out, self._phases, self._sizes, self._commit = out, phases, sizes, commit
        self._seconds, self._grace_s = 60 * minutes, grace_s

    def run(self) -> None:
        """Every phase in turn. Time that one does not need is shared by those after it."""
        began = monotonic()
        with tempfile.TemporaryDirectory(prefix="tokentwin-suite-", ignore_cleanup_errors=True) as scratch:
            for number, phase in enumerate(self._phases):
                share = phase.minutes / sum(later.minutes for later in self._phases[number:])
                seconds = share * max(began + self._seconds - monotonic(), 0.0)
                self._run(phase, Path(scratch), seconds)
        self.results.set("seconds", round(monotonic() - began, 1))

    def _run(self, phase: Phase, scratch: Path, seconds: float) -> None:
        started = monotonic()
        work = Work(self._sizes, self._out, scratch, self.results, self._commit, started + seconds)
        if self.results.found.get(f"{phase.name}_failed"):  # in a run before this one
            self.results.set(f"{phase.name}_failed", None)

        def failed(why: str) -> None:
            self.results.set(f"{phase.name}_failed", why)

        run_apart(lambda: work.keep(phase.name, phase.run(work)), seconds + self._grace_s, failed)
        if phase.after is not None:
            phase.after(work)
        took = monotonic() - started
        self.results.set(f"{phase.name}_seconds", round(took, 1))
        print(f"{phase.name}: {took:.0f} s", file=sys.stderr, flush=True)
