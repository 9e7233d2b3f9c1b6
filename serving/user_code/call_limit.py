"""The time limit of calls to a user's own policy, router or cost model, which may raise anything or never return.

The wall clock is only used to end calls that hang, so no result depends on this clock. At each tick, a timer checks
whether the present call is still the call of the previous tick. The timer runs until the call ends, or, in a run with
many calls, until the run ends.
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

from tokentwin.serving.errors import UserError, raised

CALL_LIMIT_S = 10.0
_TICKS = 10  # ticks per CALL_LIMIT_S
_LONGER = 6  # an import or a constructor, which may read much, has a limit that is longer by this factor
_MOST_IGNORED = 3  # a call that goes on after this number of `Overtime`s is assumed never to end


class Overtime(BaseException):
    """The exception that is raised inside a call that takes too long; `except Exception` does not catch it."""


class Fault(Exception):
    """The error of a call that failed or took too long; `__cause__` is the exception that it raised, if any."""

    def __init__(self, rule: Literal["calls", "time"], what: str) -> None:
        self.rule, self.what = rule, what
        super().__init__(what)


class _Watch:
    """The watch over the calls of one thread.

    Attributes:
        calls: number of calls begun plus number of calls ended; odd during a call
        calls_at_tick: value of `calls` at the last tick
        name: name of the present call
        limits: time limit of the present call, as a multiple of CALL_LIMIT_S
        ticks: number of ticks during the present call
        overtimes: number of `Overtime`s raised during the present call
        ticks_of_overtime: value of `ticks` at the last `Overtime`
        timer: the running timer, which `close` stops; None if none runs
        in_run: True if the timer goes on between calls
        ends_s: time of the monotonic clock at which `time_limit` ends; None without such a limit
        limit_s: length of that limit in seconds
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

    UserError and KeyboardInterrupt pass unchanged. A call may take at most `CALL_LIMIT_S` seconds. Calls within a call
    are part of that call.
    """
    return _limited(1, call, *arguments, **settings)


def limited_longer(call: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call an import or a constructor in the way of `limited`, but with a longer time limit."""
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
        watch.calls += 1  # from here on the timer raises no `Overtime`
        raise Fault("time", _overtime(watch)) from None
    finally:
        watch.calls += watch.calls % 2
        if not watch.in_run:
            _stop(watch)


@contextmanager
def watching() -> Iterator[None]:
    """Keep one timer running for all calls of this thread in this context."""
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
    """Limit all calls of this thread together to `limit_s` seconds. The call that exceeds the limit raises `Fault`."""
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
    """Return whether this tick has to raise `Overtime` in the present call, at most once in `_TICKS` ticks.

    A second `Overtime` right after the first could hit the code after the call.
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
    """End the process with status 2, because nothing else ends the call."""
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
    """Run a timer by a signal in the main thread; the signal also wakes the thread from a sleep."""

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
    """Run a timer in another thread. The watched thread gets the exception when it next runs Python code."""
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
