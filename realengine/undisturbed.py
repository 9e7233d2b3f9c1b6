"""Ctrl-C and the search for reference cycles, kept away from the steps of a run."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ctrl_c_heard() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed, instead of a KeyboardInterrupt at any place.

    A second Ctrl-C is obeyed at once. Outside of the main thread, which alone gets the signal, the function says no.
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
    """Delay Ctrl-C to the end: a rank that left half way would leave the others in the middle of a collective."""
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
    """Search once now, and not again until the context is left."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
