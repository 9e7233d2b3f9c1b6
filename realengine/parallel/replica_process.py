"""A process with a real engine, as its parent process sees it; the process ends when its parent ends.

In the engine's process a thread reads the pipe. So reading never delays the engine's steps, and neither process waits
for the other to read.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from tokentwin.realengine.parallel.replica_pipe import Inbox
from tokentwin.serving.errors import UserError
from tokentwin.serving.python_process import without_main
from tokentwin.serving.user_code.call_limit import watch

_ENDING_S = 5.0  # time that a process may take to end by itself


class ReplicaProcess:
    """A process with engine number `number`; `gpus`, if given, becomes its CUDA_VISIBLE_DEVICES.

    The process calls `serve`, which loads the engine and works until the pipe raises EOFError. `ranks` is True if the
    engine starts processes of its own. Calls raise UserError if the engine cannot execute them or has ended. Call
    `close` to end the process.
    """

    def __init__(
        self, number: int, serve: Callable[[Inbox, Connection], None], gpus: str | None = None, ranks: bool = False
    ) -> None:
        spawn = get_context("spawn")
        self.number = number
        self.pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(serve, gpus, theirs), daemon=not ranks)
        with without_main():
            self._process.start()
        theirs.close()

    def begin(self, call: str, *arguments: object) -> None:
        """Begin the call named `call`; `heard` returns the answer."""
        self.send((call, arguments))

    def ask(self, call: str, *arguments: object) -> Any:
        """Make a call and return the answer."""
        self.begin(call, *arguments)
        return self.heard()

    def send(self, message: object) -> None:
        """Send a message to the process."""
        with contextlib.suppress(OSError):  # the process has ended: `heard` says why
            self.pipe.send(message)

    def heard(self) -> Any:
        """Wait for the next message of the process and return it."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(_ENDING_S)
            code = self._process.exitcode
            how = f"was ended by signal {-code}" if code is not None and code < 0 else "ended; see its output"
            raise UserError(f"replica {self.number}", "lost", f"its engine {how}; start again") from None
        if isinstance(said, UserError):
            raise said
        if isinstance(said, Exception):
            raise RuntimeError(f"replica {self.number}: {said}")
        return said

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process, so that it does nothing until another signal continues it."""
        assert self._process.pid is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has ended: `heard` says why
            return False

    def close(self) -> None:
        """End the process; this may be called more than once, and after an error."""
        self.pipe.close()
        self._process.join(_ENDING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(serve: Callable[[Inbox, Connection], None], gpus: str | None, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the parent says when to end
    watch(partial(_say, pipe))
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # CUDA reads this when it is first used, which is later
    try:
        serve(Inbox(pipe), pipe)
    except (EOFError, OSError):
        pass
    except UserError as error:
        _say(pipe, UserError(error.field, error.value, error.remedy))
    except Exception as error:
        _say(pipe, RuntimeError(f"{type(error).__name__}: {error}"))


def _say(pipe: Connection, error: Exception) -> None:
    with contextlib.suppress(OSError):
        pipe.send(error)
