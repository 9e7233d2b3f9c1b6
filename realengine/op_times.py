"""The time of a step, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from realengine.device import Mark

COLLECTIVES = frozenset({"all_reduce", "all_gather"})


class OpTimes(Protocol):
    """The timer of operations, called around each: `with times("attention"): ...`."""

    def __call__(self, op: str) -> AbstractContextManager[None]: ...


class Untimed:
    """A timer that does nothing; it costs next to nothing, and may be captured in a graph."""

    def __call__(self, op: str) -> AbstractContextManager[None]:
        return _NOTHING


_NOTHING = nullcontext()


class Timed:
    """Marks on the device before and after each operation, or each of `ops`."""

    def __init__(self, mark: Callable[[], Mark], ops: frozenset[str] | None = None) -> None:
        self._mark = mark
        self._ops = ops
        self._spans: list[tuple[str, Mark, Mark]] = []

    def __call__(self, op: str) -> AbstractContextManager[None]:
        return self._span(op) if self._ops is None or op in self._ops else _NOTHING

    @contextmanager
    def _span(self, op: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append((op, start, self._mark()))

    def totals(self) -> dict[str, int]:
        """Return ns by operation; the step must have been waited for."""
        totals: dict[str, int] = {}
        for op, start, end in self._spans:
            totals[op] = totals.get(op, 0) + end.ns() - start.ns()
        return totals
