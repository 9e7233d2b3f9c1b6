"""Calls to a user's own policy, router or cost model, which may raise anything, or never return.

The wall clock only ends calls that hang; no result ever depends on it. A timer ticks and checks whether the call under
way is still the call of the tick before. It runs from the first call until that call ends, or, in a run with many
calls, until the run ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import FrameType
from typing import Any, Literal

from serving.errors import UserError, raised

CALL_LIMIT_S = 10.0
_TICKS = 10  # ticks per CALL_LIMIT_S
_LONGER = 6  # an import or a constructor, which may read much, may take so many times as long
_MOST_IGNORED = 3  # a call that goes on after so many `Overtime`s will not end


class Overtime(BaseException):
    """A call took too long; raised inside that call, where no `except Exception` of a policy stops it."""


class Fault(Exception):
    """A call failed instead of returning; `__cause__` is the exception that it raised, if it raised one."""

    def __init__(self, rule: Literal["calls", "time"], what: str) -> None:
        self.rule, self.what = rule, what
        super().__init__(what)


class _Watch:
    """The watch over the calls of one thread.

    Attributes:
        calls: calls begun plus calls ended: odd while one is under way
        calls_at_tick: `calls` at the last tick
        name, limits: name of the call under way, and how many CALL_LIMIT_S it may take
        ticks, overtimes: number of ticks and of `Overtime`s during that call
        ticks_of_overtime: ticks at the last `Overtime`
        timer: what to close when no more calls are to be watched; None while nothing ticks
        in_run: whether the timer goes on between calls
        ends_s, limit_s: when the time of `time_limit` is over, and how long that was
    """

    def __init__(self) -> None:
        self.limits = 1
        self.calls = self.calls_at_tick = self.ticks = self.overtimes = self.ticks_of_overtime = 0
        self.timer: ExitStack | None = None
        self.in_run = False
        self.name = ""
        self.ends_s: float | None = None
        self.limit_s = 0.0


class _Threads(threading.local):
    def __init__(self) -> None:
        self.watch = _Watch()


_threads = _Threads()


def limited(call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Return what `call` returns; raise `Fault` if it fails or takes too long.

    A UserError and Ctrl-C pass unchanged. A call takes at most `CALL_LIMIT_S` seconds. Calls within a call are part of
    it.
    """
    return _limited(1, call, *arguments, **settings)


def limited_longer(call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call an import or a constructor as `limited` does, with a longer limit."""
    return _limited(_LONGER, call, *arguments, **settings)


def _limited(limits: int, call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    watch = _threads.watch
    if watch.calls % 2:
        return call(*arguments, **settings)
    if watch.timer is None:
        watch.timer = _ticking(watch)
    watch.limits = limits
    watch.name = getattr(call, "__name__", "a call").lstrip("_")
    watch.calls += 1
    try:
        try:
            if watch.ends_s is not None and monotonic() >= watch.ends_s:
                raise Overtime
            return call(*arguments, **settings)
        except (UserError, KeyboardInterrupt, Overtime):
            raise
        except BaseException as error:
            raise Fault("calls", f"raised {raised(error)}") from error
    except Overtime:
        watch.calls += 1  # the timer ends no call from here on
        raise Fault("time", _overtime(watch)) from None
    finally:
        watch.calls += watch.calls % 2
        if not watch.in_run:
            _stop(watch)


@contextmanager
def watching() -> Iterator[None]:
    """Keep one timer for the many calls of this thread."""
    watch = _threads.watch
    before, watch.in_run = watch.in_run, True
    try:
        yield
    finally:
        watch.in_run = before
        if not before:
            _stop(watch)


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Limit all calls of this thread together to `limit_s` seconds; the last one then raises a `Fault`."""
    watch = _threads.watch
    watch.ends_s, watch.limit_s = monotonic() + limit_s, limit_s
    try:
        yield
    finally:
        watch.ends_s = None


def _overtime(watch: _Watch) -> str:
    if watch.ends_s is not None and monotonic() >= watch.ends_s:
        return f"{watch.name}() was under way after {watch.limit_s:g} s, the limit of all calls together"
    return f"{watch.name}() has not returned after {CALL_LIMIT_S * watch.limits:g} s, the limit of one call"


def _is_over(watch: _Watch) -> bool:
    """Return whether a tick has to end the call under way, with one `Overtime` in `_TICKS` ticks.

    A second `Overtime` at once could hit the code after the call.
    """
    if watch.calls % 2 == 0:
        return False
    if watch.calls != watch.calls_at_tick:
        watch.calls_at_tick = watch.calls
        watch.ticks = watch.overtimes = 0
        watch.ticks_of_overtime = -_TICKS
    watch.ticks += 1
    late = watch.ticks > _TICKS * watch.limits or (watch.ends_s is not None and monotonic() >= watch.ends_s)
    if not late or watch.ticks - watch.ticks_of_overtime < _TICKS:
        return False
    watch.ticks_of_overtime = watch.ticks
    watch.overtimes += 1
    return True


def _leave(watch: _Watch) -> None:
    """End the process, since nothing else ends the call."""
    line = UserError("call", f"{watch.name}()", "catches what would end it after its limit; let it return")
    os.write(2, f"tokentwin: {line}\n".encode())
    os._exit(2)


def _stop(watch: _Watch) -> None:
    timer, watch.timer = watch.timer, None
    if timer is not None:
        timer.close()


def _ticking(watch: _Watch) -> ExitStack:
    with ExitStack() as stack:
        in_main = threading.current_thread() is threading.main_thread()
        stack.enter_context(_by_signal(watch) if in_main else _by_thread(watch))
        return stack.pop_all()
    raise AssertionError


@contextmanager
def _by_signal(watch: _Watch) -> Iterator[None]:
    """Tick in the main thread, by a signal, which also wakes the thread from a sleep."""

    def tick(number: int, frame: FrameType | None) -> None:
        if _is_over(watch):
            if watch.overtimes > _MOST_IGNORED:
                _leave(watch)
            raise Overtime

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, CALL_LIMIT_S / _TICKS, CALL_LIMIT_S / _TICKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _by_thread(watch: _Watch) -> Iterator[None]:
    """Tick in another thread, which gets the exception when it next runs Python code."""
    watched, over = threading.get_ident(), threading.Event()

    def look() -> None:
        while not over.wait(CALL_LIMIT_S / _TICKS):
            if _is_over(watch):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(watched), ctypes.py_object(Overtime))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
