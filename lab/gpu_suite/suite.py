"""A runner of phases, one after the other, each in a separate process with its share of the time.

A phase is a list of units of work. A unit that crashes, or leaves the GPU's context broken, loses only its own results:
the phase goes on after it in a new process. A phase that hangs is killed. The results count the units of every phase
that were planned and done, and say what went wrong. Processes are forked, so that they start at once with everything
imported. CUDA does not survive a fork, so this process never uses the GPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from lab.gpu_suite.results import FILE, Progress, Results, ceilings_of
from lab.gpu_suite.sizes import Sizes
from lab.gpu_suite.units import Counted, OutOfTime, Unit
from tokentwin.realengine.devices.speed import GpuClock, Speed

GRACE_S = 25.0  # seconds; phases check the time and end by themselves, and a phase that is this late is killed
_COUNTING_S = 5.0  # seconds in which a phase whose time is up before it begins counts what it will not do
_DYING_S = 10.0  # seconds after a kill; a process that still exists is blocked in a driver, and is left behind
_BARREN = 3  # after so many processes in a row that finished no unit, the phase is given up
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


class Phase(NamedTuple):
    """A phase, a separate process that runs its units in order.

    `units` returns the same units in each process of the phase, and must be quick: a unit that is not reached must cost
    nothing. A unit may yield rows, which are kept under the phase's name. `after` runs in the suite's process when the
    phase has ended, even if it failed.

    Attributes:
        minutes: planned time; the phases that run divide the suite's time in proportion to it
    """

    name: str
    minutes: float
    units: Callable[[Work], Sequence[Unit]]
    after: Callable[[Work], None] | None = None


class Suite:
    """One run of `phases`.

    Everything that it writes is in `out`: results.jsonl, kernels.parquet, recordings-N.tar, calibration.json. Files of
    an earlier run in `out` are removed, unless `adding` is True: then only the rows of the phases that run again are.
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
        self._forget(phase.name)
        deadline = started + seconds + (self._grace_s if seconds > 0 else min(self._grace_s, _COUNTING_S))
        barren = 0
        while True:
            before = self.results.progress(phase.name)
            ended = run_apart(
                partial(_units, phase, work, before), deadline - monotonic(), partial(self._failed, phase.name)
            )
            after = self.results.progress(phase.name)
            barren = 0 if after.done > before.done else barren + 1
            # A process that broke down is followed by another, which goes on after the unit that broke it.
            if ended or not before.begun < after.begun < after.units or work.left() <= 0:
                break
            if barren == _BARREN:
                self._failed(phase.name, f"given up: {_BARREN} processes in a row finished nothing")
                break
        if phase.after is not None:
            phase.after(work)
        took = monotonic() - started
        self.results.set(f"{phase.name}_seconds", round(took, 1))
        done = self.results.progress(phase.name)
        print(f"{phase.name}: {took:.0f} s, {done.done} of {done.planned} done", file=sys.stderr, flush=True)

    def _failed(self, phase: str, why: str) -> None:
        """Note why a process of a phase ended, and at which of its units, numbered from 1."""
        unit = self.results.progress(phase).begun
        self.results.add("failures", {"phase": phase, "unit": unit, "error": why})

    def _forget(self, phase: str) -> None:
        """Remove what an earlier run, to which this run adds, has found in a phase."""
        earlier = self.results.values
        if earlier.get(f"{phase}_progress"):
            self.results.set(f"{phase}_progress", None)
            self.results.set("failures", [row for row in earlier.get("failures", []) if row["phase"] != phase])
        if earlier.get(phase):
            self.results.set(phase, [])


def _units(phase: Phase, work: Work, before: Progress) -> None:
    """Run the units of a phase after those that have begun `before`, until time is up, and count them."""
    clock = find_clock(work.sizes.device)
    units = phase.units(work)
    so_far = before._replace(units=len(units), planned=before.planned or len(units))

    def note(progress: Progress) -> Progress:
        work.results.set(f"{phase.name}_progress", progress._asdict())
        return progress

    so_far = note(so_far)
    for number in range(so_far.begun, len(units)):
        if work.left() <= 0:
            return
        so_far = note(so_far._replace(begun=number + 1))
        clock()  # what it was before this unit does not count
        counted = None
        try:
            for row in units[number]() or ():
                if isinstance(row, Counted):
                    counted = row
                    so_far = note(so_far._replace(**counted._asdict()))
                else:
                    work.results.add(phase.name, row)
        except OutOfTime:
            so_far = note(so_far._replace(begun=number))
            return
        if counted is None:
            so_far = so_far._replace(done=so_far.done + 1)
        so_far = note(so_far.at_clock(clock()))
        if context_is_lost():
            raise LostContext("an error of CUDA has broken the context; what follows runs in a new process")


class LostContext(Exception):
    """Raised after a unit that has broken the GPU's context: every later call would fail."""


def find_clock(device: str) -> Speed:
    """Return a reader of the GPU's clock; it reads None on a CPU and without NVML."""
    return GpuClock(0) if device == "cuda" else lambda: None


def context_is_lost() -> bool:
    """Return whether CUDA calls of this process fail from now on, as after an illegal memory access."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


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
