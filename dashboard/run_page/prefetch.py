"""Computes what stands further down on a page while what is above it is drawn.

For a run of millions of steps each takes a second or more. numpy and pyarrow compute without Python's lock, so a
second thread takes the second core.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread


def prefetch(*works: Callable[[], object]) -> None:
    """Calls these one after another, in a thread of their own, for what they leave in the caches of the page.

    An error is left for the page to meet, when it asks for the same.
    """
    Thread(target=_call, args=works, daemon=True).start()


def _call(*works: Callable[[], object]) -> None:
    for work in works:
        with suppress(Exception):
            work()
