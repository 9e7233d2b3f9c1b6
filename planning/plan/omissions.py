"""Parts around an answer that is known. One that fails is omitted, with its error, and never ends the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tokentwin.serving.errors import UserError

Made = TypeVar("Made")
Other = TypeVar("Other")


class Omissions:
    """The parts that an answer lacks: `lines` name each one with its error."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def part(self, what: str, make: Callable[[], Made], otherwise: Other) -> Made | Other:
        """Return what `make` returns. If it raises an exception, note it and return `otherwise`."""
        try:
            return make()
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.lines.append(f"{what}: {' '.join(why.split())}")
            return otherwise
