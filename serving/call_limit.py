"""Calls to a user's own policy or router, which may raise anything, or never return.

A wall clock is looked at, but only to end a run that hangs: no result ever depends on it. One timer ticks for a whole
run and sees whether the call under way is still the one of the tick before, so that a call costs two additions.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from serving.errors import UserError, raised

CALL_LIMIT_S = 10.0


class Overtime(BaseException):
    """Raised inside the call that takes too long. No `except Exception` of a policy stops it."""


class Fault(Exception):
    """What a call did instead of returning. It is caused by what the call raised, if that was it."""

    def __init__(self, rule: Literal["calls", "time"], what: str) -> None:
        self.rule, self.what = rule, what
        super().__init__(what)


class CallWatch:
    """Watches one thread's calls while it is `on`, if they are to be watched at all.

    calls    calls begun plus calls ended: odd while one is under way
    limit_s  seconds that a call may take, and up to twice that until it is seen
    """

    def __init__(self, needed: bool) -> None:
        self.calls = 0
        self.limit_s = CALL_LIMIT_S
        self._needed = needed
        self._at_last_tick = 0

    def call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What it returns. Raises `Fault` for whatever it does instead, but a UserError and Ctrl-C as they are."""
        self.calls += 1
        try:
            return call(*arguments)
        except (UserError, KeyboardInterrupt):
            raise
        except Overtime:
            name = getattr(call, "__name__", "a call").lstrip("_")
            what = f"{name}() has not returned after {self.limit_s:g} s, the limit of one call"
            raise Fault("time", what) from None
        except BaseException as error:
            raise Fault("calls", f"raised {raised(error)}") from error
        finally:
            self.calls += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        """From now on a call that lasts from one tick to the next is ended by `Overtime`."""
        if not self._needed:
            yield
            return
        timer = self._by_signal if threading.current_thread() is threading.main_thread() else self._by_thread
        self._at_last_tick = 0
        with timer():
            yield

    @property
    def _overtime(self) -> bool:
        same = self.calls == self._at_last_tick
        self._at_last_tick = self.calls
        return same and self.calls % 2 == 1

    @contextmanager
    def _by_signal(self) -> Iterator[None]:
        """The main thread: a signal also wakes it from a sleep."""

        def tick(number: int, frame: FrameType | None) -> None:
            if self._overtime:
                raise Overtime

        before = signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s, self.limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def _by_thread(self) -> Iterator[None]:
        """Any other thread gets the exception when it next runs Python code."""
        watched, over = threading.get_ident(), threading.Event()

        def watch() -> None:
            while not over.wait(self.limit_s):
                if self._overtime:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(watched), ctypes.py_object(Overtime))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
