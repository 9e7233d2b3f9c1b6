"""Work in a process group of its own: what it does to itself, or to the GPU's context, ends with it.

The process is forked, so that it starts at once with everything imported. CUDA does not survive a fork, so the process
that forks must never have used it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import torch

_DYING_S = 10.0  # a process that a driver holds on to is left behind after this


def run_apart(work: Callable[[], None], seconds: float, failed: Callable[[str], None]) -> bool:
    """Run `work` in a process group of its own for at most `seconds`; whether it ended well.

    If it did not, `failed` is told why in one line: what it raised, what signal ended it, or that its time was up.
    Whatever the group has left running is killed. Raises RuntimeError if this process has used CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("this process has used CUDA and cannot be forked: a bug of the suite")
    sys.stdout.flush()
    sys.stderr.flush()
    process = get_context("fork").Process(target=_lead, args=(work, failed))
    process.start()
    assert process.pid is not None
    with suppress(OSError):  # the child does so too; whoever is first
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


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_REPORTED = 3  # exit code of a process that has said itself what it raised


def _lead(work: Callable[[], None], failed: Callable[[str], None]) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    with suppress(OSError, AttributeError):  # Linux: end with the parent, also if that is killed
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
