"""A runner of phases, one after the other, each in a separate process with its share of the time.

A phase that crashes, hangs or breaks the GPU's context loses only its own results: the failure is a line in the
results, and the next phase runs. Processes are forked, so that they start at once with everything imported. CUDA does
not survive a fork, so this process never uses the GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from lab.gpu_suite.results import FILE, Results, ceilings_of
from lab.gpu_suite.sizes import Sizes

GRACE_S = 25.0  # seconds; phases check the time and end by themselves, and a phase that is this late is killed
_DYING_S = 10.0  # seconds after a kill; a process that still exists is blocked in a driver, and is left behind
_LEFT_BEFORE = (FILE, "kernels.parquet", "calibration.json", "recordings-*.tar")


class Work(NamedTuple):
    """The inputs of a phase.

    `scratch` is a folder of this run, `end` is the time on `monotonic` at which the phase should be done.
    """

    sizes: Sizes
    out: Path
    scratch: Path
    results: Results
    commit: str
    end: float

    def left(self) -> float:
        """Return the seconds until the phase should be done."""
        return self.end - monotonic()

    @property
    def ceilings(self) -> dict[str, Any]:
        """The ceilings by name, as measured before, or stand-ins."""
        return ceilings_of(self.results.values)

    def keep(self, name: str, rows: Iterable[dict[str, Any]] | None) -> None:
        """Append rows to the list `name` as they come, until time is up."""
        for row in rows or ():
            self.results.add(name, row)
            if self.left() < 0:
                break


class Phase(NamedTuple):
    """A phase: `run` does its work in a separate process, and may yield rows, which are kept under its name.

    `after` runs in this process when the separate process has ended, even if that failed.

    Attributes:
        minutes: planned time; the phases that run divide the suite's time in proportion to it
    """

    name: str
    minutes: float
    run: Callable[[Work], Iterable[dict[str, Any]] | None]
    after: Callable[[Work], None] | None = None


class Suite:
    """One run of `phases`.

    Everything that it writes is in `out`: results.jsonl, kernels.parquet, recordings-N.tar, calibration.json. Files of
    an earlier run in `out` are removed, unless `adding` is True.
    """

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
        """Run every phase in turn. Time that a phase does not need goes to the phases after it."""
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
        if self.results.values.get(f"{phase.name}_failed"):  # failed in an earlier run that this run adds to
            self.results.set(f"{phase.name}_failed", None)

        def failed(why: str) -> None:
            self.results.set(f"{phase.name}_failed", why)

        run_apart(lambda: work.keep(phase.name, phase.run(work)), seconds + self._grace_s, failed)
        if phase.after is not None:
            phase.after(work)
        took = monotonic() - started
        self.results.set(f"{phase.name}_seconds", round(took, 1))
        print(f"{phase.name}: {took:.0f} s", file=sys.stderr, flush=True)


def run_apart(work: Callable[[], None], seconds: float, failed: Callable[[str], None]) -> bool:
    """Run `work` in a separate process group for at most `seconds`; return whether it ended well.

    If it did not, `failed` gets the reason in one line: an exception, a signal, or that its time was up. Processes of
    the group that still run are killed. Raises RuntimeError if this process has used CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("this process has used CUDA and cannot be forked: a bug of the suite")
    sys.stdout.flush()
    sys.stderr.flush()
    process = get_context("fork").Process(target=_lead, args=(work, failed))
    process.start()
    assert process.pid is not None
    with suppress(OSError):  # parent and child both call it, because either may be first
        os.setpgid(process.pid, process.pid)
    try:
        process.join(max(seconds, 0.0))
        late = process.is_alive()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(_DYING_S)
    if late:
        failed(f"killed: not done after {seconds:.0f} s")
    elif process.exitcode is not None and process.exitcode < 0:
        failed(f"ended by {signal.Signals(-process.exitcode).name}")
    elif process.exitcode not in (0, _REPORTED):
        failed(f"ended with exit code {process.exitcode}")
    return not late and process.exitcode == 0


_PR_SET_PDEATHSIG = 1  # a constant of linux/prctl.h
_REPORTED = 3  # exit code of a process that has reported its own exception


def _lead(work: Callable[[], None], failed: Callable[[str], None]) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    with suppress(OSError, AttributeError):  # Linux: end the child with its parent, even if the parent is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        failed(f"{type(error).__name__}: {str(error)[:500]} ({Path(last.filename).name}:{last.lineno})")
        sys.exit(_REPORTED)
