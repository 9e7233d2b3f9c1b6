"""Context managers that keep Ctrl-C and cyclic garbage collection from disturbing the steps of a run."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ctrl_c_heard() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; the first Ctrl-C raises no KeyboardInterrupt.

    A second Ctrl-C raises it at once. Only the main thread gets the signal; in other threads the function returns
    False.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c_delayed() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, so that no rank leaves the others in the middle of a collective."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *received: seen.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if callable(before):
            for received in seen:
                before(*received)


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """Collect garbage now, and disable cyclic garbage collection until the end of the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
