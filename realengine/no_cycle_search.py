"""A pause in Python's search for reference cycles while an engine runs, because a search takes longer than a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """Search once now, and not again until the context is left."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
