"""Calls of a user's own policy, router, cost model or process, which is trusted but may fail, hang or leave threads.

An exception in a call becomes a `Fault`. In a process that is ours to end (`watch`), a call that does not return, or a
thread that outlives the command, ends the process with one line. Elsewhere, as in a notebook, the user interrupts it.
The wall clock is only used to end a process, so no result depends on it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from threading import Thread, get_ident
from time import monotonic, sleep
from typing import Any, NoReturn

from tokentwin.serving.errors import UserError, raised

CALL_LIMIT_S = 10.0
_LONGER = 6  # an import or a constructor, which may read much, has a limit that is longer by this factor
GRACE_S = 2.0  # time for threads to end after the command

_HANGS = "has not returned after"
_hung: set[int] = set()  # threads that were interrupted
own_code: list[str] = []  # names of what was found in a user's code in this process
_calls: dict[int, tuple[Callable[..., Any], float, float]] = {}  # by thread: its present call, its start and its limit


class Fault(Exception):
    """The error of a call that failed or hangs; `__cause__` is the exception that it raised, if any."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(what)


def limited(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `call` returns; raise `Fault` if it fails.

    UserError and KeyboardInterrupt pass unchanged. A call may take at most `CALL_LIMIT_S` seconds. Calls within a call
    are part of that call.
    """
    return _limited(CALL_LIMIT_S, call, arguments, {})


def limited_longer(call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call an import or a constructor in the way of `limited`, but with a longer time limit."""
    return _limited(_LONGER * CALL_LIMIT_S, call, arguments, settings)


def _limited(limit_s: float, call: Callable[..., Any], arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    thread = get_ident()
    if thread in _calls:
        return call(*arguments, **settings)
    _calls[thread] = call, monotonic(), limit_s
    try:
        return call(*arguments, **settings)
    except UserError:
        raise
    except KeyboardInterrupt:
        if thread in _hung:
            raise Fault(f"{_name(call)}() {_HANGS} {limit_s:g} s, the limit of one call") from None
        raise
    except BaseException as error:
        raise Fault(f"raised {raised(error)}") from error
    finally:
        del _calls[thread]


def watch(tell: Callable[[UserError], object]) -> None:
    """Watch the calls of this process from now on. When one hangs, `tell` gets the error, and the process ends."""
    Thread(target=_watch, args=(tell,), daemon=True).start()


def _watch(tell: Callable[[UserError], object]) -> NoReturn:
    main = threading.main_thread().ident or 0
    while True:
        sleep(CALL_LIMIT_S / 10)
        for thread, (call, since, limit_s) in list(_calls.items()):
            if monotonic() - since <= limit_s:
                continue
            if thread == main and thread not in _hung:
                _hung.add(thread)
                signal.pthread_kill(thread, signal.SIGINT)  # so that files that are half-written are removed
                sleep(GRACE_S)
            if _calls.get(thread, (None, 0.0))[1] == since:
                tell(UserError("call", f"{_name(call)}()", f"{_HANGS} {limit_s:g} s, the limit of one call"))
                os._exit(2)


def _name(call: Callable[..., Any]) -> str:
    return getattr(call, "__name__", "a call").lstrip("_")


def print_error(error: UserError) -> None:
    """Print the error on stderr, even if the thread that hangs holds a lock of Python's streams."""
    os.write(2, f"tokentwin: {error}\n".encode(errors="backslashreplace"))


def end_threads() -> None:
    """End this process with status 2, after a while, if threads of a user's code keep it from ending."""
    if own_code and lasting_threads():
        sys.stdout.flush()
        Thread(target=_end, daemon=True).start()


def _end() -> NoReturn:
    sleep(GRACE_S)
    print_error(UserError("thread", lasting_threads(), "of your code does not end; join it, or make it a daemon"))
    os._exit(2)


def lasting_threads() -> str:
    """Return which threads Python waits for at the end of the process: a name, and how many more; empty if none."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    first, *more = [thread.name for thread in others if not thread.daemon] or [""]
    return f"{first} and {len(more)} more" if more else first
