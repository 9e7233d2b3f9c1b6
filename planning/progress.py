"""Progress of long work, shown as one progress bar on stderr, or as log lines if stderr is not a terminal."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

LOG = logging.getLogger("tokentwin")
Tell = Callable[[str, float], None]  # the current stage, and the share of all work that is done


_EARLIEST, _EARLIEST_S = 0.1, 2.0  # share of the work done and seconds passed before the first estimate


class TimeLeft:
    """An estimate of the time left, assuming that the rest of the work runs at the speed of the work done.

    The estimate never rises. If it proves far too short, there is no estimate any more.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s, self._least_s = began_s, math.inf

    def __call__(self, share: float, now_s: float) -> float | None:
        """Return the seconds left if `share` is done at the time `now_s`; None if there is no good estimate."""
        passed_s = now_s - self._began_s
        if share < _EARLIEST or passed_s < _EARLIEST_S:
            return None
        left_s = passed_s * (1 - share) / share
        self._least_s = min(self._least_s, left_s)
        return self._least_s if left_s < 2 * self._least_s + _EARLIEST_S else None


def in_words(seconds: float) -> str:
    """Return a duration in words: `50 s`, `6 min`."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def quiet(stage: str, share: float) -> None:
    """Report nothing."""


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar labelled `what`; the yielded function takes the number done of `total`."""
    from rich.progress import MofNCompleteColumn

    with _bar(what, total, MofNCompleteColumn()) as update:
        yield lambda done: update(what, done)


@contextmanager
def telling() -> Iterator[Tell]:
    """Show a bar labelled with the current stage, for functions that take a `Tell`."""
    from rich.progress import TaskProgressColumn

    with _bar("starting", 1, TaskProgressColumn()) as update:
        yield update


@contextmanager
def _bar(what: str, total: int, figures: ProgressColumn) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, left = Console(stderr=True), TimeLeft(monotonic())

    def left_text(done: float) -> str:
        left_s = left(done / max(total, 1), monotonic())
        return "" if left_s is None else f", about {in_words(left_s)} left"

    if not console.is_terminal:

        def log(stage: str, done: float) -> None:
            LOG.info("%s: %.0f %% done%s", stage, 100 * done / max(total, 1), left_text(done))

        yield log
        return
    columns = (TextColumn("{task.description}{task.fields[left]}"), BarColumn(), figures, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, left="")
        yield lambda stage, done: progress.update(task, description=stage, completed=done, left=left_text(done))
