"""Units of a phase's work: what they may yield and raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Unit = Callable[[], Iterable[Any] | None]  # may return or yield rows, and `Counted` among them


class Counted(NamedTuple):
    """The progress of a unit that counts its own work; it replaces the phase's count of units."""

    planned: int
    done: int


class OutOfTime(Exception):
    """Raised by a unit that needs more time than is left; its phase ends, and the unit is not done."""
